"""make_plan(): how the keys of a step are cut into parts, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anabranch.call import AttendCall, CallShape, PlanOptions, shape_of
from anabranch.keys import KeySource
from anabranch.producers import choose_producer, load_producer
from anabranch.queries import check_queries, pack_queries
from anabranch.rules import check_list_rules, make_rules


@dataclass(frozen=True, slots=True)
class Plan:
    """A division of work, and the room in which parts wait for their merge.

    It holds for every attend() with the same queries, lengths and masks: the layers of one step.
    Made inside a captured graph, it is made anew from the lengths at each replay.
    """

    impl: str  # the producer that made it and runs it
    shape: CallShape
    work: Any  # the producer's own,
    tensors: list[torch.Tensor]  # and the same as arguments of a torch operator
    text: str

    def check(self, shape: CallShape) -> None:
        """Refuse a call that the plan was not made for."""
        if shape == self.shape:
            return
        for name, planned, given in zip(CallShape._fields, self.shape, shape, strict=True):
            if planned != given:
                raise ValueError(f"the plan was made for {name} = {planned}, got {given}")


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
    rules = make_rules(
        causal=causal, window=window, tree_mask=tree_mask, head_dim=q.shape[-1] if q.dim() else 1
    )
    if keys.lists_per_token is not None:
        check_list_rules(rules)
    queries = pack_queries(q, keys, cu_seqlens_q)
    check_queries(queries.packed, keys)
    call = AttendCall(queries, keys, rules, keys.view())
    options = PlanOptions(batch_invariant, fused_merge, config, rows_per_seq, leave_empty)
    name = choose_producer(call, options, impl)
    producer = load_producer(name)
    work = producer.make_plan(call, options)
    return Plan(name, shape_of(call), work, *producer.flatten_plan(work))
