"""Where the tokens of a step belong, in device memory: all that attention must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.keys import KeySource, RaggedKV
from anabranch.plan import Plan, make_plan
from anabranch.runner.kv_cache import LayerCache


class Group(NamedTuple):
    """Neighbouring sequences of similar query lengths, which share tiles."""

    tokens: slice
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], from 0
    seq_lens: torch.Tensor  # int32 [num_seqs], with the tokens of this step
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    is_fresh: bool = False  # all keys of these sequences are new: pages need not be read

    def keys(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> KeySource:
        """The keys of these sequences, given the step's new ones."""
        if self.is_fresh:
            return RaggedKV(k[self.tokens], v[self.tokens], self.cu_seqlens_q)
        return cache.keys(self.page_table, self.seq_lens)


@dataclass(slots=True, eq=False)
class Step:
    """Packed tokens of a batch; the plans that layers of one kind share are made by the first."""

    groups: list[Group]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative for tokens that are not kept
    fused_merge: bool = True
    _plans: dict[tuple[object, ...], Plan] = field(default_factory=dict[tuple[object, ...], Plan])

    def attend(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
        k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_k]
        v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
        cache: LayerCache,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Keep the new keys, and attend from the new tokens to all of their sequences'."""
        first = self.groups[0]
        append_kv(cache.keys(first.page_table, first.seq_lens), k, v, self.slot_mapping)
        outs: list[torch.Tensor] = []
        for group in self.groups:
            keys = group.keys(k, v, cache)
            state = attend(
                q[group.tokens],
                keys,
                cu_seqlens_q=group.cu_seqlens_q,
                window=window,
                softcap=softcap,
                scale=scale,
                sinks=sinks,
                plan=self._plan(q, group, keys, window),
            )
            outs.append(state.out)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _plan(
        self, q: torch.Tensor, group: Group, keys: KeySource, window: int | None
    ) -> Plan | None:
        if q.device.type == "cpu":
            return None
        shapes = (q.shape[1:], q.dtype, keys.num_kv_heads, keys.head_dim_k, keys.head_dim_v)
        kind = (group.tokens.start, window, *shapes)
        plan = self._plans.get(kind)
        if plan is None:
            plan = make_plan(
                q[group.tokens],
                keys,
                cu_seqlens_q=group.cu_seqlens_q,
                window=window,
                fused_merge=self.fused_merge,
            )
            self._plans[kind] = plan
        return plan
