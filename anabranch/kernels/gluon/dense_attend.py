"""Calls over keys and values apart, as the producer "gluon" runs them."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, new_state
from anabranch.kernels.gluon.boxes import store_refusal, takes_rows
from anabranch.kernels.gluon.plan import HopperLayout, fill_plan, lay_out
from anabranch.kernels.hopper_config import HEAD_DIMS, HopperTiles
from anabranch.kernels.load.arguments import Rows
from anabranch.kernels.parts.merge_items import merge_items
from anabranch.kernels.parts.slots import StateRows
from anabranch.state import AttentionState

__all__ = ["attend", "fill_plan", "lay_out", "prefers", "refusal"]
MIN_PAGE = 16  # keys; a box for each page of a smaller one would be slower than Triton's loads
MIN_WIDE_ROWS = 4  # the same for heads of more than 128
MIXED_ROWS = {64: 1024, 256: 128}  # of prompts and decodes together, by head dim
MIN_ROWS = 24  # query rows of a sequence on average; for fewer, Triton's narrow tiles are faster


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Whether this producer should run a call that names none: rows must fill its tiles.

    H200, 32/8 heads of 128, us here and in Triton: 8 queries (32 rows), 1 x 32768 46.5 and 47.5,
    8 x 8192 73.2 and 79.0; 4 queries, 64/8 heads, 16 x 8192 131 and 147; 16 queries, 8 x 8192 77.2
    and 91.8; 6 queries (24 rows), 4 x 16384 72.1 and 77.5, 12 queries, 32/16 heads, 37 x 115 22.5
    and 24.8. But 3 queries, 64/8 heads, 8 x 259 10.4 and 10.0.
    Heads of 256: 12 queries, 8/4 heads (24 rows), 3 x 844 to 2228: 25.6 and 33.1; 4 queries, 16/8
    heads, 1 x 1419 15.6 and 18.6, 8 x 4000 72.9 and 73.5; 8 queries, 4/2 heads, 64 x 3000 97.4 and
    104.9, 8/4 heads, 8 x 3000 37.6 and 36.3. But 1 query, 16/8 heads, 2 x 4000 28.0 and 25.6.
    Tokens that do not divide evenly among sequences are taken for prompts beside decodes: there the
    average says nothing. 512 tokens at 4608 keys beside 128 decodes at 2048: 301 and 512. Where all
    rows together are few, as of 65 tokens beside 3 decodes, 16/2 heads of 64: 10.4 and 6.5; 44
    beside 7, 4/2 heads of 256: 18.3 and 12.8; heads of 128 gain from few rows, 48 beside 2, 28/4
    heads: 10.6 and 12.2.
    """
    q, keys = call.queries.packed, call.keys
    num_tokens, num_seqs = q.shape[0], max(keys.num_seqs, 1)
    least = MIN_ROWS if q.shape[2] <= 128 else MIN_WIDE_ROWS
    if options.rows_per_seq is not None:
        return options.rows_per_seq >= least
    rows = num_tokens * q.shape[1] // keys.num_kv_heads
    if num_tokens % num_seqs and num_tokens > num_seqs:
        return rows >= MIXED_ROWS.get(q.shape[2], 0)
    return rows >= least * num_seqs


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    q, keys, view = call.queries.packed, call.keys, call.view
    dims = (q.shape[2], keys.head_dim_v)
    if dims not in HEAD_DIMS:
        known = ", ".join("/".join(map(str, pair)) for pair in HEAD_DIMS)
        return f"it has tiles for head dims {known}, got {dims[0]}/{dims[1]}"
    if options.config is not None and not isinstance(options.config, HopperTiles):
        return f"config must be HopperTiles, got {type(options.config).__name__}"
    if options.fused_merge:
        return "it merges parts by a launch of their own, got fused_merge=True"
    if view.lists is not None or view.log_weights is not None:
        return f"it copies keys in boxes, got lists of up to {keys.capacity} keys"
    page = view.page_size
    if view.page_table is not None and (page < MIN_PAGE or page & (page - 1)):
        return f"pages must hold a power of two of at least {MIN_PAGE} keys, got {page}"
    if not takes_rows(q):
        return f"q must have whole tokens, aligned to 16 bytes, got strides {q.stride()}"
    for name, store in (("k", view.k), ("v", view.v)):
        if reason := store_refusal(name, store):
            return reason
    return None


def attend(
    call: AttendCall,
    layout: HopperLayout,
    room: torch.Tensor,
    out: AttentionState | None,
) -> AttentionState:
    """The state of a call, in `out` if that is given."""
    from anabranch.kernels.gluon.kernel import OrderedWork
    from anabranch.kernels.gluon.launch import attend as launch

    q, state = call.queries.packed, out
    if state is None or not takes_rows(state.out):
        state = new_state(call)
    if q.shape[0]:
        plan = layout.open(room)
        results = StateRows(
            Rows(state.out, *state.out.stride()),
            Rows(state.lse, *state.lse.stride(), 0),
            plan.parts,
        )
        work = OrderedWork(plan.schedule, plan.counters[:1])
        launch(q, call.view, call.rules, results, work, plan.program)
        if layout.slots:
            merge_items(results, plan.schedule, layout.slots, plan.program)
    if out is None or state is out:
        return state
    out.out.copy_(state.out)
    out.lse.copy_(state.lse)
    return out
