"""Decode steps on a GPU: the first layer of a step makes what the others only launch with.

With one query a sequence, each kv head of a sequence is a sequence of its own, packed in the rows
of a contiguous cache. So the number of keys is in the lengths alone, and a step over a cache that
has grown is of the same kind as the step before it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from anabranch import AttentionState, Plan, RaggedKV, attend, make_plan
from anabranch.attend import CALLS, kind_of
from anabranch.launches.prepare import StateLaunches
from anabranch.launches.recorder import describe, stream_of

MOST_STEPS = 8  # each keeps the room of a plan; models with windows have two at a time


class _Steps(threading.local):
    """The latest steps of a thread: two threads must not share a plan."""

    def __init__(self) -> None:
        self.known: dict[Hashable, DecodeStep] = {}


_steps = _Steps()


@dataclass(frozen=True, slots=True)
class GrowingRows(RaggedKV):
    """Packed keys whose exact number is no part of the kind of a call."""

    def __post_init__(self) -> None:
        self.identify((self.k[0], self.v[0], self.cu_seqlens), self.capacity)

    @property
    def capacity(self) -> int:
        """Up to a power of two."""
        return 1 << (self.k.shape[0] - 1).bit_length()

    @property
    def total_capacity(self) -> int:
        """The same: kinds would differ with it."""
        return self.capacity


@dataclass(slots=True, eq=False)
class DecodeStep:
    """What layers share that have one query a sequence and as many keys as each other."""

    mask: torch.Tensor | None  # the spans, which are the step's own
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens: torch.Tensor
    rules: dict[str, Any]
    source: type[RaggedKV] = GrowingRows
    plan: Plan | None = None
    launches: StateLaunches | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of a layer, [num_seqs, 1, num_heads, head_dim]."""
        out, lse = self._attend(query, key, value)
        if sinks is not None:  # differ from head to head; a value of zero only takes its share
            out *= torch.sigmoid(lse - sinks)[..., None]
        return out

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> AttentionState:
        if self.launches is not None and self.plan is not None:
            before = (query, self.cu_seqlens_q, None, None, None, None)
            after = (self.plan.room, key, value, self.cu_seqlens)
            return self.launches.run(before, None, after)
        q = query.view(key.shape[0] * key.shape[1], -1, query.shape[3])
        k, v = (x.view(-1, 1, x.shape[3]) for x in (key, value))
        keys = self.source(k, v, self.cu_seqlens)
        if self.plan is None:
            self.plan = make_plan(
                q, keys, cu_seqlens_q=self.cu_seqlens_q, window=self.rules["window"]
            )
        state = attend(q, keys, cu_seqlens_q=self.cu_seqlens_q, plan=self.plan, **self.rules)
        tokens = query.shape[0], 1, query.shape[1]
        out, lse = state.out.view(*tokens, -1), state.lse.view(tokens)
        if launches := self._find_launches(q, keys, self.plan):
            self.launches = launches._replace(
                shape=tuple(out.shape), strides=out.stride(), lse_strides=lse.stride()
            )
        elif self.source is GrowingRows:  # a tensor map would hold the number of rows
            self.source, self.plan = RaggedKV, None
        return AttentionState(out, lse)

    def _find_launches(self, q: torch.Tensor, keys: RaggedKV, plan: Plan) -> StateLaunches | None:
        """What such a call launches, if that is all it does."""
        described = describe((q, self.cu_seqlens_q, *[None] * 6))
        if keys.identity is None or described is None:
            return None
        window, softcap, scale = (self.rules[name] for name in ("window", "softcap", "scale"))
        known = CALLS.get(kind_of(keys.identity, described, True, window, softcap, scale, None))
        return None if known is None else known.plans.get(plan.kind)


def attend_step(
    query: torch.Tensor,  # [num_seqs, num_heads, 1, head_dim]
    key: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim]
    value: torch.Tensor,
    spans: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The output of a layer of a decode step; None where layers share nothing."""
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        return None
    described = describe((query, key, value))
    stream = None if described is None else stream_of(query.device)
    if stream is None:
        return None
    window = None if spans is None else spans.shape[2]
    kind = (described, scale, softcap, window, stream, torch.is_grad_enabled())
    step = _steps.known.get(kind)
    if step is None or step.mask is not spans:
        if not all(x.is_contiguous() for x in (query.transpose(1, 2), key, value)):
            return None
        step = begin_step(key, spans, scale=scale, softcap=softcap)
        if len(_steps.known) >= MOST_STEPS:
            _steps.known.clear()
        _steps.known[kind] = step
    return step.attend(query, key, value, sinks)


def begin_step(
    key: torch.Tensor, spans: torch.Tensor | None, *, scale: float, softcap: float | None
) -> DecodeStep:
    """Where the keys of each sequence and kv head lie among the rows of a cache."""
    num_seqs, num_kv_heads, k_len = key.shape[:3]
    count, device = num_seqs * num_kv_heads, key.device
    rules: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": None}
    bounds = torch.arange(0, (count + 1) * k_len, k_len, dtype=torch.int32, device=device)
    if spans is None:
        return DecodeStep(None, None, bounds, rules)
    if spans.shape[2] < k_len:
        rules["window"] = spans.shape[2]
    # Between two sequences is a gap that has no query.
    rows = spans[:, 0, 0].expand(num_seqs, 2).repeat_interleave(num_kv_heads, 0)
    bounds = rows + bounds[:-1, None]
    tokens = torch.arange(count + 1, dtype=torch.int32, device=device)
    return DecodeStep(spans, tokens.repeat_interleave(2)[1:-1], bounds.flatten(), rules)
