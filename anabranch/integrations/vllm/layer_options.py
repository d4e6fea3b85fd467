"""What an attention layer of vLLM asks for, and the refusal of what attend does not have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_HEAD_SIZE = 256  # of attend's tiles on a GPU
CACHE_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How one layer attends."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    reads_other_layer: bool  # its keys are those of an earlier layer, in the cache only


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
    if kv_cache_dtype is not None and kv_cache_dtype not in CACHE_DTYPES:
        return f"kv_cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {kv_cache_dtype!r}"
    if kv_cache_dtype is not None and CACHE_DTYPES[kv_cache_dtype] not in (None, dtype):
        return f"kv_cache_dtype must be the model's {dtype}, got {kv_cache_dtype!r}"
    if attn_type != "decoder":
        return f"attn_type must be 'decoder', got {attn_type!r}"
    if has_alibi:
        return "alibi_slopes are not supported: attend adds no bias to scores"
    return None
