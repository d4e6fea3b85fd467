"""A step over a cache whose pages are dealt out over ranks (context parallel).

A page of the pool is a page on every rank, under the same number: its tokens, num_ranks times as
many as a rank's page holds, are dealt out in order. So one page table serves all ranks, and
position p of a sequence lies on rank (p // page_size) % num_ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anabranch.append import append_kv
from anabranch.distributed.attend_across import attend_across
from anabranch.distributed.dealt_kv import DealtKV
from anabranch.distributed.plan_across import AcrossPlan, plan_across
from anabranch.distributed.rank_group import RankGroup
from anabranch.runner.kv_cache import LayerCache
from anabranch.runner.step import LayerRules, Step
from anabranch.runner.step_layout import SHORT, Ints
from anabranch.state import AttentionState


@dataclass(frozen=True, slots=True)
class DealtPages:
    """Which of a step's keys this rank keeps."""

    ranks: RankGroup
    page_size: int  # of a rank's page

    def own_slots(self, slots: Ints) -> Ints:
        """Slots of the pool's pages as slots of this rank; negative for what others keep."""
        page, place = np.divmod(slots, self.page_size * self.ranks.num_ranks)
        own = (slots >= 0) & (place // self.page_size == self.ranks.rank)
        return np.where(own, page * self.page_size + place % self.page_size, -1)

    def step(self, step: Step, max_q_len: int) -> DealtStep:
        """The same step, over dealt pages. No sequence runs more than `max_q_len` tokens."""
        return DealtStep(
            step.entries, step.slot_mapping, step.fused_merge, dealt=self, max_q_len=max_q_len
        )


@dataclass(slots=True, eq=False, kw_only=True)
class DealtStep(Step):
    """Every rank attends to its own keys, and all ranks merge their states."""

    dealt: DealtPages
    max_q_len: int
    _across: dict[tuple[object, ...], AcrossPlan] = field(
        default_factory=dict[tuple[object, ...], AcrossPlan]
    )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Keep this rank's new keys; attend from the new tokens to the keys of all ranks."""
        first = self.entries[0]
        append_kv(cache.keys(first.page_table, first.seq_lens), k, v, self.slot_mapping)
        rules = LayerRules(scale, window, softcap, sinks)
        outs: list[torch.Tensor] = []
        for place, entry in enumerate(self.entries):
            if entry.is_fresh:  # every rank has computed all keys, in this step
                state = self._state(q, place, entry.keys(k, v, cache), rules)
            else:
                state = self._state_across(q[entry.tokens], place, cache, rules)
            outs.append(state.out)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _state_across(
        self, q: torch.Tensor, place: int, cache: LayerCache, rules: LayerRules
    ) -> AttentionState:
        entry, ranks = self.entries[place], self.dealt.ranks
        keys = DealtKV(
            cache.k, cache.v, entry.page_table, entry.seq_lens, ranks.rank, ranks.num_ranks
        )
        options: Any = {"causal": entry.causal, "tree_mask": entry.tree_mask}
        options |= {"cu_seqlens_q": entry.cu_seqlens_q, "window": rules.window}
        kind = (place, rules.window, q.shape[1:], q.dtype, cache.k.shape, cache.v.shape)
        plan = self._across.get(kind)
        if plan is None:
            is_short = place < len(self.entries) - 1
            longest = min(self.max_q_len, SHORT) if is_short else self.max_q_len
            plan = self._across[kind] = plan_across(q, keys, max_q_len=longest, **options)
        return attend_across(
            q,
            keys,
            ranks.group,
            scale=rules.scale,
            softcap=rules.softcap,
            sinks=rules.sinks,
            plan=plan,
            **options,
        )
