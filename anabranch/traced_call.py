"""A call as an operator that a tracer takes whole."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, PlanOptions, Queries
from anabranch.keys import KeySource, flatten_source, rebuild_source
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
    arguments = (
        queries.packed,
        queries.starts(),
        *flatten_source(keys),
        *rules,
        impl if plan is None else plan.impl,
        None if plan is None else plan.room,
        None if plan is None else plan.kind.number,
    )
    if out is not None and prior is None:
        torch.ops.anabranch.attend_into(*out, *arguments)
        return out
    state = AttentionState(*torch.ops.anabranch.attend(*arguments))
    state = state if prior is None else merge_prior(state, prior)
    if out is None:
        return state
    for mine, found in zip(out, state, strict=True):
        mine.copy_(found)  # a prior state is read before `out`, which may be the same, is written
    return out


@torch.library.custom_op("anabranch::attend", mutates_args=())
def _attend_op(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = Rules(causal, window, softcap, scale, sinks, tree_mask)
    keys = rebuild_source(kind, key_tensors, key_static)
    return _run_traced(q, cu_seqlens_q, keys, rules, impl, plan_room, plan_number, None)


@_attend_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim_v = rebuild_source(kind, key_tensors, key_static).head_dim_v
    shape = (q.shape[0], q.shape[1], head_dim_v)
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32)


@torch.library.custom_op("anabranch::attend_into", mutates_args=("out", "lse"))
def _attend_into_op(
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
    plan_room: torch.Tensor | None,
    plan_number: int | None,
) -> None:
    rules = Rules(causal, window, softcap, scale, sinks, tree_mask)
    keys = rebuild_source(kind, key_tensors, key_static)
    state = AttentionState(out, lse)
    _run_traced(q, cu_seqlens_q, keys, rules, impl, plan_room, plan_number, state)


@_attend_into_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(*_: object) -> None:
    pass


def _run_traced(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    keys: KeySource,
    rules: Rules,
    impl: str | None,
    plan_room: torch.Tensor | None,
    plan_number: int | None,
    out: AttentionState | None,
) -> AttentionState:
    """A call from the arguments of an operator; what was traced is checked already."""
    call = AttendCall(Queries(q, cu_seqlens_q, 0, keys.num_seqs), keys, rules, keys.view())
    if plan_room is None or plan_number is None:
        return plan_call(call, UNPLANNED, impl).attend(call, out)
    return Plan(NUMBERED[plan_number], plan_room).attend(call, out)
