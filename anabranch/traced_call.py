"""A call as an operator that a tracer takes whole."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, Queries, new_state
from anabranch.keys import flatten_source, rebuild_source
from anabranch.plan import NUMBERED, Plan, plan_call
from anabranch.prior import merge_prior
from anabranch.rules import Rules
from anabranch.state import AttentionState

UNPLANNED = PlanOptions()


def trace_call(
    call: AttendCall, out: AttentionState | None, plan: Plan | None, impl: str | None
) -> AttentionState:
    """The state of a call, which has been checked."""
    queries, keys, rules, _, prior = call
    # A prior state is read before `out`, which may be the same, is written.
    state = out if out is not None and prior is None else new_state(call)
    torch.ops.anabranch.attend(
        *state,
        queries.packed,
        queries.starts(),
        *flatten_source(keys),
        *rules,
        impl if plan is None else plan.impl,
        None if plan is None else plan.room,
        None if plan is None else plan.kind.number,
    )
    if prior is None:
        return state
    state = merge_prior(state, prior)
    if out is None:
        return state
    for mine, found in zip(out, state, strict=True):
        mine.copy_(found)
    return out


@torch.library.custom_op("anabranch::attend", mutates_args=("out", "lse"))
def _attend_op(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    impl: str | None,
    plan_room: torch.Tensor | None,  # scratch: only this call reads it
    plan_number: int | None,
) -> None:
    """A call from its arguments; what was traced is checked already."""
    keys = rebuild_source(kind, key_tensors, key_static)
    rules = Rules(causal, window, softcap, scale, sinks, tree_mask)
    call = AttendCall(Queries(q, cu_seqlens_q, 0, keys.num_seqs), keys, rules, keys.view())
    if plan_room is None or plan_number is None:
        plan = plan_call(call, UNPLANNED, impl)
    else:
        plan = Plan(NUMBERED[plan_number], plan_room)
    plan.attend(call, AttentionState(out, lse))


@_attend_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(*_: object) -> None:
    pass
