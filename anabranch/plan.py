"""make_plan(): how the keys of a step are cut into parts, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from anabranch.call import (
    AttendCall,
    CallShape,
    PlanLayout,
    PlanOptions,
    check_packing,
    check_queries,
    pack_queries,
    shape_of,
)
from anabranch.keys import KeySource
from anabranch.launches.prepare import PreparedLaunches, prepare
from anabranch.launches.recorder import Kinds, allocate, describe, record
from anabranch.prior import merge_prior
from anabranch.producers import choose_producer, load_producer
from anabranch.rules import Rules, check_list_rules, make_rules
from anabranch.state import AttentionState


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PlanKind:
    """All of a plan but what lies in device memory; plans of one kind share the object."""

    impl: str  # the producer that makes and runs it
    shape: CallShape
    layout: PlanLayout
    number: int  # its name in a traced graph


@dataclass(frozen=True, slots=True)
class Plan:
    """A division of work, and the room in which parts wait for their merge.

    It holds for every attend() with the same queries, lengths and masks: the layers of one step.
    Made inside a captured graph, it is made anew from the lengths at each replay.
    """

    kind: PlanKind
    room: torch.Tensor  # bytes

    @property
    def impl(self) -> str:
        """The producer that made it and runs it."""
        return self.kind.impl

    @property
    def work(self) -> Any:
        """The producer's own view of it."""
        return self.kind.layout.open(self.room)

    def attend(self, call: AttendCall, out: AttentionState | None) -> AttentionState:
        """The state of a call that the plan is for, prior states included."""
        producer = load_producer(self.kind.impl)
        state = producer.attend(call, self.kind.layout, self.room, out)
        if call.prior is None or producer.RESUMES:
            return state
        return merge_prior(state, call.prior)

    def check(self, shape: CallShape) -> None:
        """Refuse a call that the plan was not made for."""
        if shape == self.kind.shape:
            return
        for name, planned, given in zip(CallShape._fields, self.kind.shape, shape, strict=True):
            if planned != given:
                raise ValueError(f"the plan was made for {name} = {planned}, got {given}")


class KnownPlan(NamedTuple):
    """How plans of calls that were checked are made: one allocation, and what fills it."""

    kind: PlanKind
    rules: Rules  # without a mask
    empty: Plan | None  # holds nothing, and so for all calls
    filling: PreparedLaunches | None  # None: the producer fills it


KINDS = Kinds[tuple[str, CallShape, PlanLayout], PlanKind]()
NUMBERED = WeakValueDictionary[int, PlanKind]()
PLANS = Kinds[tuple[Any, ...], KnownPlan]()
_numbers = count()


def make_plan(
    q: torch.Tensor,
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    fused_merge: bool | None = None,
    config: object | None = None,
    rows_per_seq: float | None = None,
    leave_empty: bool = False,
    impl: str | None = None,
) -> Plan:
    """Divide the work of `attend(q, keys, ...)` with these options among the GPU's processors.

    Only the shape, dtype and device of `q` and `keys` matter, and the lengths, which are read on
    the device. With `batch_invariant`, keys are cut at fixed boundaries, so that a sequence's
    result has the same bits in any batch of the same query length. A second launch merges the
    parts if `fused_merge` is False, none does if it is True, and by default the producer chooses;
    either way a graph holds it. `config` overrides the tiles, which are
    otherwise selected for `rows_per_seq` query rows (tokens times group) a sequence, by default
    the average. With `leave_empty`, rows that see no key may be left as they are in the `out` of
    attend(), where the caller has put empty states: then they cost nothing. `impl`
    chooses the producer, as in attend(), which then runs every call that is given the plan.

    The parts of a call wait in the plan, so calls that share it must run one after the other. On
    one stream they do; for calls on several streams, make a plan for each.
    """
    options = PlanOptions(batch_invariant, fused_merge, config, rows_per_seq, leave_empty)
    identity, kind = keys.identity, None
    if identity is not None and config is None:
        described = describe((q, cu_seqlens_q))
        if described is not None:
            order = (causal, window, tree_mask is None)
            kind = (identity.kind, described, *order, options, impl)
            if (known := PLANS.get(kind)) is not None:
                return _plan_again(known, q, keys, cu_seqlens_q, tree_mask)
    rules = make_rules(
        causal=causal, window=window, tree_mask=tree_mask, head_dim=q.shape[-1] if q.dim() else 1
    )
    if keys.lists_per_token is not None:
        check_list_rules(rules)
    check_packing(q, keys, cu_seqlens_q)
    queries = pack_queries(q, keys, cu_seqlens_q)
    check_queries(queries.packed, keys)
    call = AttendCall(queries, keys, rules, keys.view())
    if kind is None or identity is None:
        return plan_call(call, options, impl)
    with record(q.device) as recording:
        plan = plan_call(call, options, impl)
    filling = prepare(recording, (q, cu_seqlens_q), identity.tensors, (plan.room,))
    empty = None if plan.kind.layout.size else plan
    PLANS.keep(kind, KnownPlan(plan.kind, rules._replace(tree_mask=None), empty, filling))
    return plan


def _plan_again(
    known: KnownPlan,
    q: torch.Tensor,
    keys: KeySource,
    cu_seqlens_q: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
) -> Plan:
    """The plan of a call like one that was checked."""
    if known.empty is not None:
        return known.empty
    kind = known.kind
    room = allocate((kind.layout.size,), (1,), torch.uint8, q.device)
    if known.filling is not None and keys.identity is not None:
        run, launches, _ = known.filling
        run(launches, (q, cu_seqlens_q, *keys.identity.tensors, room))
    else:
        rules = known.rules if tree_mask is None else known.rules._replace(tree_mask=tree_mask)
        call = AttendCall(pack_queries(q, keys, cu_seqlens_q), keys, rules, keys.view())
        load_producer(kind.impl).fill_plan(call, kind.layout, room)
    return Plan(kind, room)


def plan_call(call: AttendCall, options: PlanOptions, impl: str | None) -> Plan:
    """The plan of a call that has been checked."""
    name, device = choose_producer(call, options, impl), call.queries.packed.device
    producer = load_producer(name)
    layout = producer.lay_out(call, options)
    kind = _kind_of(name, shape_of(call), layout)
    room = torch.empty(layout.size, dtype=torch.uint8, device=device)
    producer.fill_plan(call, layout, room)
    return Plan(kind, room)


def _kind_of(impl: str, shape: CallShape, layout: PlanLayout) -> PlanKind:
    known = KINDS.get((impl, shape, layout))
    if known is None:
        known = PlanKind(impl, shape, layout, next(_numbers))
        NUMBERED[known.number] = KINDS.keep((impl, shape, layout), known)
    return known
