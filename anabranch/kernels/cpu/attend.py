"""Attention on the CPU: states of torch's flash kernel over ranges of keys, merged."""

from __future__ import annotations

from itertools import pairwise

import torch

from anabranch.kernels.cpu.batches import Batch, make_batches
from anabranch.kernels.cpu.blockwise import attend_blockwise
from anabranch.kernels.cpu.columns import Views
from anabranch.kernels.cpu.flash import MAX_FOLDED_LEN, flash
from anabranch.kernels.cpu.masks import Visibility
from anabranch.kernels.cpu.merge import merge
from anabranch.keys import KeySource, PagedKV
from anabranch.state import AttentionState

MAX_MERGED_ELEMENTS = 1 << 18  # of a state; temporaries stay in the cache, 5 times faster
MAX_COPIED_BYTES = 8 << 20  # beyond 32 MiB glibc maps fresh pages at every call, 4 times slower


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor,  # int32 [num_seqs + 1]
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    sinks: torch.Tensor | None,  # [num_heads]
    tree_mask: torch.Tensor | None,  # bool [num_tokens, width]
) -> AttentionState:
    """The state of every query; rows of no sequence are empty."""
    shape = (*q.shape[:2], keys.v.shape[-1])
    bounds = cu_seqlens_q.tolist()
    state = None
    use_flash = softcap is None and q.shape[2] == shape[2]
    join_long = use_flash and window is None and not isinstance(keys, PagedKV)
    for batch in make_batches(q, keys, bounds, window, join_long):
        visibility = _visibility(batch, causal, window, tree_mask)
        if use_flash:
            part = _attend_flash(batch, visibility, scale)
        else:
            part = attend_blockwise(batch, visibility, shape[2], scale=scale, softcap=softcap)
        part = AttentionState(*(x.flatten(0, 1) for x in part))
        if batch.tokens == slice(0, len(q)):
            state = part
        else:
            state = state or AttentionState.empty(shape, dtype=q.dtype)
            state.out[batch.tokens], state.lse[batch.tokens] = part
    state = state or AttentionState.empty(shape, dtype=q.dtype)
    if sinks is not None:
        attended = AttentionState(*(x[None, bounds[0] : bounds[-1]] for x in state))
        _merge_rows((attended, AttentionState.sink(sinks, attended)), attended)
    return state


def _visibility(
    batch: Batch, causal: bool, window: int | None, tree_mask: torch.Tensor | None
) -> Visibility:
    q_len, k_len = batch.q.shape[1], batch.k_len
    tree = None if tree_mask is None else tree_mask[batch.tokens].unflatten(0, (-1, q_len))
    if window is not None and window >= k_len:
        window = None
    return Visibility(q_len, k_len, causal, window, tree, batch.starts)


def _attend_flash(batch: Batch, visibility: Visibility, scale: float) -> AttentionState:
    state = None
    for rows, ranges in visibility.row_blocks():
        parts = tuple(
            _attend_range(batch, visibility, scale, rows, part)
            for columns in ranges
            for part in _cut(batch, columns)
        )
        if len(parts) == 1 and rows == slice(0, visibility.q_len):
            return parts[0]
        state = state or AttentionState.empty(batch.q.shape, dtype=batch.q.dtype)
        if len(parts) == 1:
            state.out[:, rows], state.lse[:, rows] = parts[0]
        else:
            _merge_rows(parts, AttentionState(state.out[:, rows], state.lse[:, rows]))
    return state


def _merge_rows(parts: tuple[AttentionState, ...], merged: AttentionState) -> None:
    """Merge over the rows of dimension 1, a few at a time."""
    num_seqs, q_len, num_heads, head_dim = merged.out.shape
    step = max(MAX_MERGED_ELEMENTS // (num_seqs * num_heads * head_dim), 1)
    for start in range(0, q_len, step):
        rows = slice(start, start + step)
        some = tuple(AttentionState(out[:, rows], lse[:, rows]) for out, lse in parts)
        merge(some, False, merged.out[:, rows], merged.lse[:, rows])


def _cut(batch: Batch, columns: slice) -> list[slice]:
    """Copies for few queries are made and read in the cache, a part at a time."""
    num_seqs, q_len = batch.q.shape[:2]
    if isinstance(batch.columns, Views) or q_len > MAX_FOLDED_LEN:
        return [columns]
    k_len = columns.stop - columns.start
    row_bytes = sum(x.shape[-2] * x.shape[-1] * x.itemsize for x in batch.columns[:2])
    num_parts = -(-num_seqs * k_len * row_bytes // MAX_COPIED_BYTES)
    edges = [columns.start + i * k_len // num_parts for i in range(num_parts + 1)]
    return [slice(*edge) for edge in pairwise(edges)]


def _attend_range(
    batch: Batch, visibility: Visibility, scale: float, rows: slice, columns: slice
) -> AttentionState:
    q = batch.q if rows == slice(0, visibility.q_len) else batch.q[:, rows]
    k, v = batch.columns.read(columns)
    if visibility.is_square_causal(rows, columns):
        return flash(q, k, v, scale=scale, causal=True)
    return flash(q, k, v, scale=scale, mask=visibility.tile(rows, columns))
