"""Attention of a step over latent rows: absorbed, or with expanded keys where that is cheaper."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

import torch

from anabranch.append import append_kv
from anabranch.compositions.latent_prompt import attend_latent_prompt
from anabranch.compositions.prompt_pieces import make_prompt_layout
from anabranch.compositions.sections import LayerRules
from anabranch.compositions.up_projection import UpProjection
from anabranch.keys import LatentKV, RaggedKV
from anabranch.llm.runner.kv_cache import LayerCache
from anabranch.llm.runner.step import Entry, Step
from anabranch.llm.runner.step_layout import HostLens
from anabranch.merge import merge
from anabranch.state import AttentionState


def attend_latent(
    step: Step,
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_nope + rotary]
    rows: torch.Tensor,  # [num_tokens, rank + rotary]
    cache: LayerCache,
    up: UpProjection,
    *,
    scale: float,
    max_workspace_mib: float,
) -> torch.Tensor:
    """Keep the new rows, and attend from the new tokens; [num_tokens, num_heads, head_dim_v]."""
    first = step.entries[0]
    keys = cache.latent_keys(first.page_table, first.seq_lens)
    append_kv(keys, rows, None, step.slot_mapping, saturated=cache.saturated)
    call = LatentCall(step, q, rows, cache, up, scale, max_workspace_mib)
    outs: list[torch.Tensor] = []
    for _, found in groupby(range(len(step.entries)), lambda i: step.entries[i].tokens):
        places = list(found)
        states = [call.state(place, alone=len(places) == 1) for place in places]
        outs.append(states[0].out if len(states) == 1 else merge(*states, with_lse=False))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def attend_fresh_rows(
    q: torch.Tensor, rows: torch.Tensor, up: UpProjection, *, scale: float
) -> torch.Tensor:
    """Attention of one sequence that has no cache yet.

    It also takes the memory that absorbed queries and their outputs would, for a profile of memory.
    """
    absorbed = up.absorb(q)
    up.values(torch.empty_like(absorbed)[..., : up.rank])
    del absorbed
    table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
    keys = LatentKV(rows[:1, None], table, table[0], head_dim_v=up.rank)
    return attend_latent_prompt(
        q, rows, keys, up, q_lens=[len(q)], context_lens=[0], scale=scale
    ).out


class LatentCall(NamedTuple):
    """One layer's attention within a step."""

    step: Step
    q: torch.Tensor
    rows: torch.Tensor
    cache: LayerCache
    up: UpProjection
    scale: float
    max_workspace_mib: float

    def state(self, place: int, *, alone: bool) -> AttentionState:
        """The state of one entry, with values of every head; `alone` it has all their keys."""
        step, up, entry = self.step, self.up, self.step.entries[place]
        rules, num_tokens = LayerRules(self.scale), entry.tokens.stop
        lens = None
        if step.host_lens is not None and alone and entry.causal and entry.tree_mask is None:
            lens = step.host_lens.within(entry.tokens)
        if entry.is_fresh and lens is None:
            rows = self._kept_rows(entry)
            keys = RaggedKV(*up.expand(rows), entry.cu_seqlens_q)
            return step.attend_entry(self.q, place, keys, rules)
        keys = self.cache.latent_keys(entry.page_table, entry.seq_lens)
        if lens is not None and (entry.is_fresh or self._is_long(lens)):
            return self._expanded(place, keys, lens)
        out, lse = step.attend_entry(up.absorb(self.q[:num_tokens]), place, keys, rules)
        return AttentionState(up.values(out), lse)

    def _is_long(self, lens: HostLens) -> bool:
        average = sum(lens.q_lens) / len(lens.q_lens)
        return self.up.prefers_expanded(average, self.rows.shape[1])

    def _kept_rows(self, entry: Entry) -> torch.Tensor:
        """The entry's new rows as the cache holds them; absorbed queries read them from there."""
        if self.cache.is_plain:
            return self.rows[entry.tokens]
        keys = self.cache.latent_keys(entry.page_table, entry.seq_lens)
        return keys.read_slots(self.step.slot_mapping[entry.tokens].clamp(min=0))

    def _expanded(self, place: int, keys: LatentKV, lens: HostLens) -> AttentionState:
        """By groups of heads and pieces of keys, whose layout the layers of a step share."""
        entry, up, width = self.step.entries[place], self.up, self.rows.shape[1]
        options: Any = {**lens._asdict(), "max_workspace_mib": self.max_workspace_mib}
        kind = (place, up.weight.shape, width, self.max_workspace_mib)
        layout = self.step.prompts.get(kind)
        if layout is None:
            expanded = up.expanded(width, keys.page_size)
            layout = make_prompt_layout(expanded, **options, fused_merge=self.step.fused_merge)
            self.step.prompts[kind] = layout
        options |= {"scale": self.scale, "layout": layout}
        return attend_latent_prompt(
            self.q[entry.tokens], self._kept_rows(entry), keys, up, **options
        )
