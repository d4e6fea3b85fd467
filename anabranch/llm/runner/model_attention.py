"""The attention function that transformers calls while the engine runs a model.

Before a model is called, its step is put into a slot. Layers find it by the slot's number, which
stays the same for the life of a model: compiled code is not guarded by anything that changes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, cast

import torch
from torch import nn

from anabranch.attend import attend
from anabranch.compositions.up_projection import UpProjection
from anabranch.kernels.cpu.decoder import PagedStep
from anabranch.keys import DenseKV
from anabranch.llm.models.attention_functions import register_attention
from anabranch.llm.runner.kv_cache import LayerCache, LayerShape
from anabranch.llm.runner.latent_step import attend_fresh_rows, attend_latent
from anabranch.llm.runner.step import Step

NAME = "anabranch_engine"
_numbers = count()
_steps: dict[int, Step] = {}
Layers = dict[nn.Module, LayerShape]
_found: ContextVar[Layers] = ContextVar("_found")  # filled while layers are collected


def register() -> None:
    """Make the function known to models; no mask function, so models make no masks."""
    register_attention(NAME, engine_attention)


def engine_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim_k]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim_k]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim_v]; of latent rows, their part
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    up_projection: UpProjection | None = None,
    max_workspace_mib: float = 256,
    **_: object,  # what models pass for other implementations: dropout, position ids and the like
) -> tuple[torch.Tensor, None]:
    """Attention over the engine's cache; [1, num_tokens, num_heads, head_dim_v]."""
    if attention_mask is not None or position_bias is not None or is_causal is False:
        raise ValueError(f"{type(module).__name__} needs more than causal attention over a cache")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if up_projection is not None:
        rows = k[:, 0]
        out = _latent_attention(module, q, rows, up_projection, scale, max_workspace_mib)
        return out[None], None
    if not hasattr(module, "anabranch_slot"):  # not bound: layers are being collected
        _check_window(module, sliding_window)
        _collect(module, LayerShape(k.shape[1], k.shape[2], v.shape[2], k.dtype))
        keys = DenseKV(k[None], v[None])
        state = attend(
            q[None], keys, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return state.out, None
    cache, slot = cast("tuple[LayerCache, int]", (module.anabranch_cache, module.anabranch_slot))
    if torch.compiler.is_compiling():
        out = torch.ops.anabranch.engine_attend(
            q, k, v, cache.tensors(), s_aux, slot, scale, sliding_window, softcap
        )
    else:
        out = _steps[slot].attend(
            q, k, v, cache, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    return cast("torch.Tensor", out)[None], None


def paged_step(
    attentions: Sequence[nn.Module], num_tokens: int, num_heads: int
) -> PagedStep | None:
    """What all of these layers read in the step that runs, where one kernel can serve them all."""
    slot = cast("int | None", getattr(attentions[0], "anabranch_slot", None))
    if slot is None:
        return None
    caches = cast("list[LayerCache]", [module.anabranch_cache for module in attentions])
    return _steps[slot].paged_step(caches, num_tokens, num_heads)


cast("Any", engine_attention).paged_step = paged_step  # as models ask for it


def _latent_attention(
    module: nn.Module,
    q: torch.Tensor,
    rows: torch.Tensor,
    up: UpProjection,
    scale: float,
    max_workspace_mib: float,
) -> torch.Tensor:
    """Attention over the latent rows of the engine's cache."""
    if not hasattr(module, "anabranch_slot"):
        _collect(module, LayerShape(1, rows.shape[1], up.rank, rows.dtype, is_latent=True))
        return attend_fresh_rows(q, rows, up, scale=scale)
    cache, slot = cast("tuple[LayerCache, int]", (module.anabranch_cache, module.anabranch_slot))
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.engine_attend_latent(
            q,
            rows,
            [cache.k, cache.k_scales, cache.saturated],
            up.weight,
            up.head_dim_nope,
            slot,
            scale,
            max_workspace_mib,
        )
    options: Any = {"scale": scale, "max_workspace_mib": max_workspace_mib}
    return attend_latent(_steps[slot], q, rows, cache, up, **options)


@contextmanager
def collecting() -> Generator[Layers]:
    """Let layers that are not bound attend to new keys alone, and note what each of them keeps."""
    layers: Layers = {}
    token = _found.set(layers)
    try:
        yield layers
    finally:
        _found.reset(token)


def _collect(module: nn.Module, shape: LayerShape) -> None:
    layers, name = _found.get(), type(module).__name__
    if module in layers:
        raise ValueError(
            f"{name} calls attention twice in a step: a layer keeps the keys and values of one call"
        )
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name} is not causal: keys in pages would depend on later tokens")
    layers[module] = shape


def _check_window(module: nn.Module, window: int | None) -> None:
    """Refuse layers whose window is given by a mask only, since the engine makes no masks."""
    kinds: Sequence[str] | None = getattr(getattr(module, "config", None), "layer_types", None)
    index: int | None = getattr(module, "layer_idx", None)
    if kinds is None or index is None or index >= len(kinds):
        return
    if window is None and kinds[index] != "full_attention":
        raise ValueError(
            f"layer {index} of kind {kinds[index]!r} gives {type(module).__name__} no "
            "sliding_window: its attention cannot be distinguished from full attention"
        )


def bind_layers(layers: Sequence[nn.Module], caches: Sequence[LayerCache]) -> int:
    """Give every layer its cache; the number of the slot they read steps from."""
    slot = next(_numbers)
    for module, cache in zip(layers, caches, strict=True):
        module.anabranch_cache = cache  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        module.anabranch_slot = slot  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return slot


@contextmanager
def running(slot: int, step: Step) -> Generator[None]:
    """Let the layers of a slot attend within a step."""
    _steps[slot] = step
    try:
        yield
    finally:
        del _steps[slot]


@torch.library.custom_op("anabranch::engine_attend", mutates_args=())
def _engine_attend_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    # written, but read by this operator only: nothing to keep in order
    cache: list[torch.Tensor | None],
    sinks: torch.Tensor | None,
    slot: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    return _steps[slot].attend(
        q,
        k,
        v,
        LayerCache(*cache, query_dtype=q.dtype),  # pyright: ignore[reportArgumentType]
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


@_engine_attend_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


@torch.library.custom_op("anabranch::engine_attend_latent", mutates_args=())
def _engine_attend_latent_op(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: list[torch.Tensor | None],  # rows, scales and a counter: written, but read here only
    weight: torch.Tensor,
    head_dim_nope: int,
    slot: int,
    scale: float,
    max_workspace_mib: float,
) -> torch.Tensor:
    kept, scales, saturated = cache
    assert kept is not None
    values, up = kept[..., : weight.shape[2]], UpProjection(weight, head_dim_nope)
    pages = LayerCache(kept, values, scales, None, saturated, q.dtype)
    options: Any = {"scale": scale, "max_workspace_mib": max_workspace_mib}
    return attend_latent(_steps[slot], q, rows, pages, up, **options)


@_engine_attend_latent_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    q: torch.Tensor,
    rows: torch.Tensor,
    cache: list[torch.Tensor | None],
    weight: torch.Tensor,
    head_dim_nope: int,
    *_: object,
) -> torch.Tensor:
    del rows, cache
    return q.new_empty(q.shape[0], q.shape[1], weight.shape[1] - head_dim_nope)
