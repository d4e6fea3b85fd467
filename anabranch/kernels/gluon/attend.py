"""The producer "gluon": states by a warp-specialised kernel for Hopper GPUs, in 16 bits."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, new_state
from anabranch.device import capability
from anabranch.kernels.gluon.boxes import store_refusal, takes_rows
from anabranch.kernels.gluon.latent_attend import (
    attend_latent_keys,
    latent_refusal,
    prefers_latent,
)
from anabranch.kernels.gluon.latent_plan import LatentLayout, fill_latent, lay_out_latent
from anabranch.kernels.gluon.plan import HopperLayout, fill_items, lay_out_items
from anabranch.kernels.hopper_config import HEAD_DIMS, HopperTiles
from anabranch.state import AttentionState

RESUMES = False
MIN_PAGE = 16  # keys; a box for each page of a smaller one would be slower than Triton's loads
MIN_ROWS = 32  # query rows of a sequence on average; for fewer, Triton's narrow tiles are faster


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Whether this producer should run a call that names none: rows must fill its tiles.

    H200, 32/8 heads of 128, us here and in Triton: 8 queries (32 rows), 1 x 32768 46.5 and 47.5,
    8 x 8192 73.2 and 79.0; 4 queries, 64/8 heads, 16 x 8192 131 and 147; 16 queries, 8 x 8192 77.2
    and 91.8. But 3 queries, 64/8 heads (24 rows), 8 x 259 10.4 and 10.0.
    """
    if call.view.values_in_keys:
        return prefers_latent(call, options)
    q, keys = call.queries.packed, call.keys
    if options.rows_per_seq is not None:
        return options.rows_per_seq >= MIN_ROWS
    return q.shape[0] * q.shape[1] >= MIN_ROWS * keys.num_kv_heads * max(keys.num_seqs, 1)


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    q, keys, view = call.queries.packed, call.keys, call.view
    if capability(q.device)[0] != 9:
        return f"it needs a Hopper GPU (compute capability 9), got q on {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs queries of float16 or bfloat16, got {str(q.dtype)[6:]}"
    if view.values_in_keys:
        return latent_refusal(call, options)
    dims = (q.shape[2], keys.head_dim_v)
    if dims not in HEAD_DIMS:
        known = ", ".join("/".join(map(str, pair)) for pair in HEAD_DIMS)
        return f"it has tiles for head dims {known}, got {dims[0]}/{dims[1]}"
    if options.config is not None and not isinstance(options.config, HopperTiles):
        return f"config must be HopperTiles, got {type(options.config).__name__}"
    if options.fused_merge is False:
        return "it merges parts without a second launch, got fused_merge=False"
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


def lay_out(call: AttendCall, options: PlanOptions) -> HopperLayout | LatentLayout:
    """Room for what divides the work of a call."""
    if call.view.values_in_keys:
        return lay_out_latent(call, options)
    return lay_out_items(call, options)


def fill_plan(call: AttendCall, layout: HopperLayout | LatentLayout, room: torch.Tensor) -> None:
    """Divide the work of a call."""
    if isinstance(layout, LatentLayout):
        fill_latent(call, layout, room)
    else:
        fill_items(call, layout, room)


def attend(
    call: AttendCall,
    layout: HopperLayout | LatentLayout,
    room: torch.Tensor,
    out: AttentionState | None,
) -> AttentionState:
    """The state of a call, in `out` if that is given."""
    if isinstance(layout, LatentLayout):
        return attend_latent_keys(call, layout, room, out)
    from anabranch.kernels.gluon.launch import attend as launch

    q, state = call.queries.packed, out
    if state is None or not takes_rows(state.out):
        state = new_state(call)
    if q.shape[0]:
        plan = layout.open(room)
        where = plan.order, plan.counter, plan.parts
        launch(q, call.view, call.rules, state, *where, plan.constants)
    if out is None or state is out:
        return state
    out.out.copy_(state.out)
    out.lse.copy_(state.lse)
    return out
