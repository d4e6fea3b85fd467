"""The producer "torch" of a CPU: a kernel in C where that can serve a call, else torch's flash
kernel over ranges of keys, whose states are merged, or a blockwise path.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from anabranch.call import AttendCall, PlanOptions
from anabranch.kernels.cpu.batches import Batch, make_batches
from anabranch.kernels.cpu.blockwise import attend_blockwise
from anabranch.kernels.cpu.flash import MAX_FOLDED_LEN, flash
from anabranch.kernels.cpu.masks import Visibility
from anabranch.kernels.cpu.merge import merge
from anabranch.kernels.cpu.pages import attend_pages, reads_pages
from anabranch.rules import Rules
from anabranch.state import AttentionState

RESUMES = False
MAX_MERGED_ELEMENTS = 1 << 18  # of a state; temporaries stay in the cache, 5 times faster
MAX_COPIED_BYTES = 8 << 20  # beyond 32 MiB glibc maps fresh pages at every call, 4 times slower


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    del options
    device = call.queries.packed.device
    return None if device.type == "cpu" else f"it is the CPU's, got q on {device}"


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Every call that it can run."""
    del call, options
    return True


class NoLayout(NamedTuple):
    """Sequences are brought together when they are attended to: there is nothing to divide."""

    size: int = 0

    def open(self, room: torch.Tensor) -> None:
        """Nothing is in the room."""
        del room


def lay_out(call: AttendCall, options: PlanOptions) -> NoLayout:
    del call, options
    return NoLayout()


def fill_plan(call: AttendCall, layout: NoLayout, room: torch.Tensor) -> None:
    del call, layout, room


def attend(
    call: AttendCall, layout: NoLayout, room: torch.Tensor, out: AttentionState | None
) -> AttentionState:
    """The state of a call, in `out` if that is given; rows of no sequence are empty."""
    del layout, room
    rules, starts = call.rules, call.queries.starts()
    bounds = starts.tolist()
    state = _attend_pages(call, starts)
    if state is None:
        state = _attend_batches(call, bounds)
    if rules.sinks is not None:
        attended = AttentionState(*(x[None, bounds[0] : bounds[-1]] for x in state))
        _merge_rows((attended, AttentionState.sink(rules.sinks, attended)), attended)
    return state if out is None else _write(state, out)


def _attend_batches(call: AttendCall, bounds: list[int]) -> AttentionState:
    """By torch's kernels, over sequences of similar shape side by side."""
    q, keys, rules = call.queries.packed, call.keys, call.rules
    head_dim_v, state = keys.head_dim_v, None
    shape = (*q.shape[:2], head_dim_v)
    plain = rules.softcap is None and call.view.log_weights is None
    use_flash = plain and q.shape[2] == head_dim_v
    join_long = use_flash and rules.window is None and keys.is_contiguous
    for batch in make_batches(q, keys, bounds, rules.window, join_long):
        visibility = _visibility(batch, rules)
        if use_flash:
            part = _attend_flash(batch, visibility, rules.scale)
        else:
            part = attend_blockwise(
                batch, visibility, head_dim_v, scale=rules.scale, softcap=rules.softcap
            )
        part = AttentionState(*(x.flatten(0, 1) for x in part))
        if batch.tokens == slice(0, len(q)):
            state = part
        else:
            state = state or AttentionState.empty(shape, dtype=q.dtype)
            state.out[batch.tokens], state.lse[batch.tokens] = part
    return state or AttentionState.empty(shape, dtype=q.dtype)


def _write(state: AttentionState, out: AttentionState) -> AttentionState:
    out.out.copy_(state.out)
    out.lse.copy_(state.lse)
    return out


def _attend_pages(call: AttendCall, starts: torch.Tensor) -> AttentionState | None:
    """By the kernel of ours; None where that cannot serve the call."""
    rules, q = call.rules, call.queries.packed
    hidden = {"softcap": rules.softcap, "tree_mask": rules.tree_mask}
    if not reads_pages(q, call.keys, starts, **hidden):
        return None
    order = {"causal": rules.causal, "window": rules.window}
    return attend_pages(q, call.keys, starts, scale=rules.scale, **order)


def _visibility(batch: Batch, rules: Rules) -> Visibility:
    q_len, k_len = batch.q.shape[1], batch.k_len
    tree, window = rules.tree_mask, rules.window
    if tree is not None:
        tree = tree[batch.tokens].unflatten(0, (-1, q_len))
    if window is not None and window >= k_len:
        window = None
    return Visibility(q_len, k_len, rules.causal, window, tree, batch.starts)


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
    if not batch.columns.copied_bytes or q_len > MAX_FOLDED_LEN:
        return [columns]
    k_len = columns.stop - columns.start
    num_parts = -(-num_seqs * k_len * batch.columns.copied_bytes // MAX_COPIED_BYTES)
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
