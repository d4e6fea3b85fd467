"""A step over a cache whose pages are dealt out over ranks (context parallel).

A page of the pool is a page on every rank, under the same number: its tokens, num_ranks times as
many as a rank's page holds, are dealt out in order. So one page table serves all ranks, and
position p of a sequence lies on rank (p // page_size) % num_ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch

from anabranch.compositions.sections import LayerRules
from anabranch.distributed.attend_across import attend_across
from anabranch.distributed.dealt_kv import DealtKV
from anabranch.distributed.plan_across import AcrossPlan, plan_across
from anabranch.distributed.rank_group import RankGroup
from anabranch.keys import KeySource, PagedKV
from anabranch.llm.runner.step import Step
from anabranch.llm.runner.step_layout import Ints
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

    def _reads_pages(self, *given: Any, **options: Any) -> bool:
        """The kernel that keeps keys while it attends knows no ranks."""
        del given, options
        return False

    def attend_entry(
        self, q: torch.Tensor, place: int, keys: KeySource, rules: LayerRules
    ) -> AttentionState:
        """Attention of one entry to the keys of all ranks."""
        entry, ranks = self.entries[place], self.dealt.ranks
        if entry.is_fresh:  # every rank has computed all keys, in this step
            return Step.attend_entry(self, q, place, keys, rules)
        pages = cast("PagedKV", keys)  # as an entry whose keys are not all new has them
        own = DealtKV(
            pages.k, pages.v, pages.page_table, pages.seq_lens, ranks.rank, ranks.num_ranks
        )
        options: Any = {"causal": entry.causal, "tree_mask": entry.tree_mask}
        options |= {"cu_seqlens_q": entry.cu_seqlens_q, "window": rules.window}
        tokens = q[entry.tokens]
        return attend_across(
            tokens,
            own,
            ranks.group,
            scale=rules.scale,
            softcap=rules.softcap,
            sinks=rules.sinks,
            plan=self._across_plan(tokens, place, own, options),
            **options,
        )

    def _across_plan(
        self, q: torch.Tensor, place: int, keys: DealtKV, options: dict[str, Any]
    ) -> AcrossPlan:
        """The plan of an entry, which layers of the same shapes and window share."""
        kind = (place, options["window"], q.shape[1:], q.dtype, keys.k.shape, keys.v.shape)
        plan = self._across.get(kind)
        if plan is None:
            plan = self._across[kind] = plan_across(q, keys, max_q_len=self.max_q_len, **options)
        return plan
