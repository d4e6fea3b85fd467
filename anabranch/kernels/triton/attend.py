"""The producer "triton": states by Triton kernels, on any GPU and in the interpreter."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, new_state
from anabranch.kernels.parts.merge_parts import merge_parts
from anabranch.kernels.triton.attend_kernel import attend as launch
from anabranch.kernels.triton.attend_lists import attend_lists, parts_of_list
from anabranch.kernels.triton.list_pages import list_pages
from anabranch.kernels.triton.plan import TritonLayout, TritonPlan, fill_plan, lay_out
from anabranch.kernels.triton.runtime import device_refusal
from anabranch.state import AttentionState

__all__ = ["attend", "fill_plan", "lay_out", "prefers", "refusal"]
RESUMES = True
MAX_HEAD_DIMS = {"q": 576, "k": 576, "v": 512}  # of the largest tiles


def refusal(call: AttendCall, options: PlanOptions) -> str | None:
    """Why a call cannot run here; None if it can."""
    del options
    q, keys, view = call.queries.packed, call.keys, call.view
    for name, dim, stride in (
        ("q", q.shape[2], q.stride(2)),
        ("k", keys.head_dim_k, view.k.dim),
        ("v", keys.head_dim_v, view.v.dim),
    ):
        most = MAX_HEAD_DIMS[name]
        if dim > most:
            return f"{name} must have a head dim from 1 to {most}, got {dim}"
        if (dim - 1) * stride >= 1 << 31:
            return f"{name} spreads a head over 2^31 elements, its last stride is {stride}"
    return device_refusal(q.device)


def prefers(call: AttendCall, options: PlanOptions) -> bool:
    """Every call that it can run."""
    del call, options
    return True


def attend(
    call: AttendCall, layout: TritonLayout, room: torch.Tensor, out: AttentionState | None
) -> AttentionState:
    """The state of a call, in `out` if that is given, over the keys of prior states too."""
    q, rules, view, prior = call.queries.packed, call.rules, call.view, call.prior
    state = new_state(call) if out is None else out
    if not q.shape[0]:
        return state
    plan = layout.open(room)
    program = plan.program
    if program.constants.leaves_empty and out is None:
        state.out.zero_()
        state.lse.fill_(float("-inf"))
    if program.constants.division.uniform:
        _check_width(call, plan)
        attend_lists(q, view, rules, state, plan.parts, program, prior)
        return state
    if view.lists is not None:
        view = view._replace(page_table=list_pages(view.lists))
    launch(q, view, rules, state, plan.schedule, plan.parts, program, prior)
    if not program.constants.merging.fused:
        merge_parts(state, plan.schedule, plan.parts, program.constants)
    return state


def _check_width(call: AttendCall, plan: TritonPlan) -> None:
    """Refuse lists whose parts do not fit into the plan's room."""
    num_lists, width = call.keys.num_seqs, call.keys.capacity
    if not width:
        raise ValueError("the plan was made for short lists, got lists of width 0")
    room = len(plan.parts.counters) // num_lists
    needed = parts_of_list(width, plan.program.constants)
    if needed > room:
        raise ValueError(
            f"the plan was made for lists of {room} parts at most, "
            f"lists of width {width} have {needed}"
        )
