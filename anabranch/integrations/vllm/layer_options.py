"""What an attention layer of vLLM asks for, and the refusal of what attend does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anabranch.compositions.sections import LayerRules

MAX_HEAD_SIZE = 256  # of attend's tiles on a GPU
CACHE_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
FP8_DTYPES = ("fp8", "fp8_e4m3")  # two names of one cache


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How one layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    reads_other_layer: bool  # its keys are those of an earlier layer, in the cache only

    @property
    def rules(self) -> LayerRules:
        return LayerRules(self.scale, self.window, self.softcap, self.sinks)


def refusal(
    *,
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    attn_type: str = "decoder",
    has_alibi: bool = False,
) -> str | None:
    """Why a layer cannot run on attend, naming the value; None if it can."""
    if not 1 <= head_size <= MAX_HEAD_SIZE:
        return f"head_size must be from 1 to {MAX_HEAD_SIZE}, got {head_size}"
    if attn_type != "decoder":
        return f"attn_type must be 'decoder', got {attn_type!r}"
    if has_alibi:
        return "alibi_slopes are not supported: attend adds no bias to scores"
    return _cache_refusal(dtype, kv_cache_dtype)


def latent_refusal(
    *,
    head_size: int,
    head_sizes: Sequence[int],  # that vLLM's latent layers may have
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    window: int | None = None,
) -> str | None:
    """Why a latent layer cannot run on attend, naming the value; None if it can."""
    if head_size not in head_sizes:
        return f"head_size must be one of {', '.join(map(str, head_sizes))}, got {head_size}"
    if window is not None:
        return f"latent layers have no windows, got sliding_window={window}"
    return _cache_refusal(dtype, kv_cache_dtype)


def _cache_refusal(dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
    if kv_cache_dtype is None or kv_cache_dtype in FP8_DTYPES:
        return None
    if kv_cache_dtype not in CACHE_DTYPES:
        names = ", ".join([*CACHE_DTYPES, *FP8_DTYPES])
        return f"kv_cache_dtype must be one of {names}, got {kv_cache_dtype!r}"
    if CACHE_DTYPES[kv_cache_dtype] not in (None, dtype):
        return f"kv_cache_dtype must be the model's {dtype}, got {kv_cache_dtype!r}"
    return None
