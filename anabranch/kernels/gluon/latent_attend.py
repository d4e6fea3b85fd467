"""Calls over latent keys, as the producer "gluon" runs them."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, new_state
from anabranch.kernels.gluon.boxes import is_flat, store_refusal
from anabranch.kernels.gluon.latent_config import LATENT_DIMS, LatentTiles
from anabranch.kernels.gluon.latent_plan import LatentLayout, fill_plan, lay_out
from anabranch.state import AttentionState

__all__ = ["attend", "fill_plan", "lay_out", "prefers", "refusal"]
LATENT_MIN_PAGE = 16  # keys; a box for each page of a smaller one would be slower than Triton's
LATENT_MIN_ROWS = 16  # query rows of a sequence on average: a tile has 64, however few are used


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Whether a call that names no producer should run here."""
    q = call.queries.packed
    if options.rows_per_seq is not None:
        return options.rows_per_seq >= LATENT_MIN_ROWS
    return q.shape[0] * q.shape[1] >= LATENT_MIN_ROWS * max(call.keys.num_seqs, 1)


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call over latent keys cannot run here; None if it can."""
    q, keys, rules, view = call.queries.packed, call.keys, call.rules, call.view
    dims = (q.shape[2], keys.head_dim_v)
    if dims != LATENT_DIMS:
        return f"it has tiles for latent rows of 576/512 columns, got {dims[0]}/{dims[1]}"
    if options.config is not None and not isinstance(options.config, LatentTiles):
        return f"config must be LatentTiles, got {type(options.config).__name__}"
    if options.fused_merge is False:
        return "it merges parts without a second launch, got fused_merge=False"
    page = view.page_size
    if page < LATENT_MIN_PAGE or page & (page - 1):
        return f"pages must hold a power of two of at least {LATENT_MIN_PAGE} keys, got {page}"
    if rules.sinks is not None:
        return f"it has no sinks over latent keys, got sinks of {tuple(rules.sinks.shape)}"
    if not is_flat(q):
        return f"q must have its heads at equal distances of 16 bytes, got strides {q.stride()}"
    if q.shape[0] * q.shape[1] >> 31:
        return f"q must have fewer than 2^31 rows, got {tuple(q.shape)}"
    return store_refusal("cache", view.k)


def attend(
    call: AttendCall, layout: LatentLayout, room: torch.Tensor, out: AttentionState | None
) -> AttentionState:
    """The state of a call, in `out` if that is given."""
    from anabranch.kernels.gluon.latent_kernel import attend_latent

    q, state = call.queries.packed, out
    if state is None or not is_flat(state.out):
        state = new_state(call)
    if q.shape[0]:
        plan = layout.open(room)
        attend_latent(q, call.view, call.rules, state, plan.schedule, plan.parts, plan.program)
    if out is None or state is out:
        return state
    out.out.copy_(state.out)
    out.lse.copy_(state.lse)
    return out
