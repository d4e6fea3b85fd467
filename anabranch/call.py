"""One call of attend(), as producers of states see it, and what a plan must know of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from anabranch.keys import KeySource, KeyView
from anabranch.queries import Queries
from anabranch.rules import Rules
from anabranch.state import AttentionState


class AttendCall(NamedTuple):
    """Attend from these queries to these keys by these rules."""

    queries: Queries
    keys: KeySource
    rules: Rules
    view: KeyView  # of the keys
    prior: AttentionState | None = None  # a stack of states over other keys, merged into this one


def new_state(call: AttendCall) -> AttentionState:
    """Memory for the state of a call; nothing is written there yet."""
    q = call.queries.packed
    shape = (q.shape[0], q.shape[1], call.keys.head_dim_v)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device)
    return AttentionState(torch.empty(shape, dtype=q.dtype, device=q.device), lse)


class PlanOptions(NamedTuple):
    """How work may be divided."""

    batch_invariant: bool = False  # the bits of a sequence do not depend on the batch
    fused_merge: bool | None = None  # parts need no second launch; None: the producer chooses
    config: object | None = None  # the producer's own tiles, in place of those it would select
    rows_per_seq: float | None = None  # that tiles are selected for; by default the average
    leave_empty: bool = False  # rows that see no key need not be written


class PlanLayout(Protocol):
    """What a plan holds; equal layouts have equal hashes."""

    @property
    def size(self) -> int:
        """Bytes of the room."""
        ...

    def open(self, room: torch.Tensor) -> Any:
        """The plan as tensors in the room, and what they are for."""
        ...


class CallShape(NamedTuple):
    """What a plan is made for, beside lengths: it serves the calls of an equal shape."""

    num_tokens: int
    num_seqs: int
    source: str  # the kind of the keys
    itemsize: int  # bytes of an element of q
    window: int | None
    causal: bool
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    page_size: int
    k_format: str
    v_format: str
    device: torch.device


def shape_of(call: AttendCall) -> CallShape:
    """The shape of a call; nothing is read from the device."""
    q, keys, rules = call.queries.packed, call.keys, call.rules
    num_tokens, num_heads, head_dim_k = q.shape
    return CallShape(
        num_tokens,
        keys.num_seqs,
        keys.kind,
        q.element_size(),
        rules.window,
        rules.in_order,
        num_heads,
        keys.num_kv_heads,
        head_dim_k,
        keys.head_dim_v,
        keys.page_size,
        call.view.k.format.name,
        call.view.v.format.name,
        q.device,
    )
