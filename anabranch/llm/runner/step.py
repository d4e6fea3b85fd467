"""One step of a model: where its tokens are kept, and what they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import torch

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.compositions.cascade import (
    MIN_SAVED_BYTES,
    MIN_SAVED_KEYS,
    Cascade,
    attend_cascade,
    make_cascade,
)
from anabranch.compositions.prompt_pieces import PromptLayout
from anabranch.compositions.prompt_workspace import PromptLens
from anabranch.compositions.quantised_prompt import PageExpander, attend_quantised_prompt
from anabranch.compositions.sections import LayerRules, Section, SectionPlans, attend_section
from anabranch.kernels.cpu.decoder import PagedStep
from anabranch.kernels.cpu.pages import NewKeys, attend_pages, reads_pages
from anabranch.keys import KeySource, PagedKV
from anabranch.llm.runner.kv_cache import LayerCache
from anabranch.llm.runner.sparse_decode import SparseDecode
from anabranch.llm.runner.step_layout import WHOLE, DecodeWay, HostLens
from anabranch.merge import merge
from anabranch.plan import Plan, make_plan
from anabranch.state import AttentionState


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Section):
    """A section, and the way of its sequences."""

    way: DecodeWay = WHOLE  # in layers without a window

    def keys(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> KeySource:
        """The keys of these sequences, given the step's new ones.

        New keys are read as they are only where the cache holds the same numbers: what a token
        attends to does not depend on how its prompt was cut into steps.
        """
        if self.is_fresh and cache.is_plain:
            return self.new_keys(k, v)
        return cache.keys(self.page_table, self.seq_lens)


@dataclass(slots=True, eq=False)
class Step:
    """Packed tokens of a batch, in entries that follow each other.

    States of entries over the same tokens are merged: a cascade is an entry for the shared prefix
    and one for what follows it. In layers without a window, an entry is cut into such parts on the
    device if its way has levels, and attends to some of its pages if that selects. The first layer
    of a kind makes the plans that the others share.
    """

    entries: list[Entry]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative for tokens that are not kept
    fused_merge: bool | None = None  # as in make_plan
    min_saved_keys: int = MIN_SAVED_KEYS  # for which a prefix is attended to once for its group
    min_saved_bytes: int = MIN_SAVED_BYTES  # by all groups, for which any prefix is
    sparse: SparseDecode | None = None  # what chooses pages for entries that select
    _plans: SectionPlans = field(default_factory=SectionPlans)
    _sparse_plans: dict[tuple[object, ...], Plan] = field(
        default_factory=dict[tuple[object, ...], Plan]
    )
    _cascades: dict[tuple[object, ...], Cascade] = field(
        default_factory=dict[tuple[object, ...], Cascade]
    )
    _chosen: dict[tuple[object, ...], PagedKV] = field(
        default_factory=dict[tuple[object, ...], PagedKV]
    )
    _in_place: dict[tuple[object, ...], bool] = field(
        default_factory=dict[tuple[object, ...], bool]
    )
    max_workspace_mib: float | None = None  # for decoded keys; None: codes are read as they are
    prompts: dict[tuple[object, ...], PromptLayout | None] = field(
        default_factory=dict[tuple[object, ...], PromptLayout | None]
    )  # over expanded keys, by entry and shapes; None where these are not expanded
    host_lens: HostLens | None = None  # of all sequences; None in a graph, where they change

    def __post_init__(self) -> None:
        before = slice(0, 0)
        for entry in self.entries:
            assert entry.tokens == before or entry.tokens.start == before.stop, "tokens left out"
            before = entry.tokens

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
        """Keep the new keys, and attend from the new tokens to the keys of their entries."""
        first = self.entries[0]
        is_whole = window is not None or first.way == WHOLE
        if is_whole and self._reads_pages(q, k, v, cache, softcap, sinks):
            keys = cache.keys(first.page_table, first.seq_lens)
            new = NewKeys(k, v, self.slot_mapping, cache.saturated)
            out = attend_pages(
                q, keys, first.cu_seqlens_q, causal=True, window=window, scale=scale, new=new
            ).out
            self._observe(cache, window)
            return out
        kept = cache.keys(first.page_table, first.seq_lens)
        append_kv(kept, k, v, self.slot_mapping, saturated=cache.saturated)
        self._observe(cache, window)
        outs: list[torch.Tensor] = []
        for _, found in groupby(range(len(self.entries)), lambda i: self.entries[i].tokens):
            states: list[AttentionState] = []
            places = list(found)
            for place in places:  # a sink is a key, to be seen once
                rules = LayerRules(scale, window, softcap, None if states else sinks)
                keys = self.entries[place].keys(k, v, cache)
                if self.entries[place].way.selects and window is None:
                    states.append(self._sparse_state(q, place, keys, rules, cache))
                elif len(places) == 1 and not cache.is_plain:
                    states.append(self._quantised_state(q, place, cast("PagedKV", keys), rules))
                else:
                    states.append(self.attend_entry(q, place, keys, rules))
            outs.append(states[0].out if len(states) == 1 else merge(*states, with_lse=False))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def paged_step(
        self, caches: Sequence[LayerCache], num_tokens: int, num_heads: int
    ) -> PagedStep | None:
        """On a CPU, what one call for all layers reads; None where each is called by itself."""
        first, entry = caches[0], self.entries[0]
        if self.sparse is not None or entry.way != WHOLE or num_tokens != len(self.slot_mapping):
            return None
        if not _are_alike(caches):
            return None
        q = first.k.new_empty(num_tokens, num_heads, first.k.shape[-1])
        if not self._reads_pages(q, q, q, first, None, None):
            return None
        keys = first.keys(entry.page_table, entry.seq_lens)
        stores = [(cache.k, cache.v) for cache in caches]
        return PagedStep(keys, stores, entry.cu_seqlens_q, self.slot_mapping)

    def _reads_pages(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> bool:
        """On a CPU, whether one kernel can keep the new keys and attend; asked once a step."""
        if q.device.type != "cpu" or sinks is not None:
            return False
        shapes = (q.shape[1:], q.dtype, cache.k.shape, cache.v.shape, softcap)
        known = self._in_place.get(shapes)
        if known is None:
            first = self.entries[0]
            plain = len(self.entries) == 1 and first.causal and first.tree_mask is None
            keys, starts = cache.keys(first.page_table, first.seq_lens), first.cu_seqlens_q
            options: Any = {"softcap": softcap, "tree_mask": None}
            known = plain and reads_pages(q, keys, starts, **options)
            known = known and self.slot_mapping.dtype == torch.int64
            self._in_place[shapes] = known
        return known and k.stride(-1) == v.stride(-1) == 1

    def attend_entry(
        self, q: torch.Tensor, place: int, keys: KeySource, rules: LayerRules
    ) -> AttentionState:
        """Attention of one entry to its keys, which may be others than those of the cache."""
        entry = self.entries[place]
        tokens, plan = q[entry.tokens], None
        if entry.way.levels and rules.window is None:
            return self._cascade_state(tokens, place, keys, rules)
        if q.device.type != "cpu":
            options: Any = {"window": rules.window, "fused_merge": self.fused_merge}
            plan = self._plans.find(entry, tokens, keys, **options)
        return attend_section(entry, tokens, keys, rules, plan)

    def _quantised_state(
        self, q: torch.Tensor, place: int, keys: PagedKV, rules: LayerRules
    ) -> AttentionState:
        """Attention of one entry to all keys of its sequences, decoded first where that pays."""
        entry = self.entries[place]
        tokens, kind = q[entry.tokens], (place, "decoded", rules.window, *_shapes(q, keys))
        if kind not in self.prompts:
            self.prompts[kind] = self._decoded_layout(tokens, entry, keys, rules.window)
        layout = self.prompts[kind]
        if layout is None:
            return self.attend_entry(q, place, keys, rules)
        return attend_quantised_prompt(
            tokens,
            keys,
            q_lens=layout.lens.q_lens,
            context_lens=layout.lens.context_lens,
            **rules._asdict(),
            layout=layout,
        )

    def _decoded_layout(
        self, q: torch.Tensor, entry: Entry, keys: PagedKV, window: int | None
    ) -> PromptLayout | None:
        if self.host_lens is None or self.max_workspace_mib is None:
            return None
        if not entry.causal or entry.tree_mask is not None or entry.way != WHOLE:
            return None
        lens = PromptLens(*self.host_lens.within(entry.tokens), window)
        expander = PageExpander(keys, q.shape[1])
        return expander.preferred_layout(lens, self.max_workspace_mib, self.fused_merge)

    def _observe(self, cache: LayerCache, window: int | None) -> None:
        if self.sparse is not None and window is None:
            self.sparse.observe(cache, self.slot_mapping)

    def _sparse_state(
        self, q: torch.Tensor, place: int, keys: KeySource, rules: LayerRules, cache: LayerCache
    ) -> AttentionState:
        """Attention of one entry to the pages that are chosen; sinks are merged afterwards."""
        assert self.sparse is not None
        tokens = q[self.entries[place].tokens]
        kind = (place, "selects", *_shapes(q, keys))
        before, plan = self._chosen.get(kind), self._sparse_plans.get(kind)
        chosen, source = self.sparse.choose(tokens, cast("PagedKV", keys), cache, before)
        self._chosen[kind] = source
        if plan is None and q.device.type != "cpu":
            plan = make_plan(chosen, source, fused_merge=self.fused_merge)
            self._sparse_plans[kind] = plan
        found = attend(chosen, source, softcap=rules.softcap, scale=rules.scale, plan=plan)
        shape = tokens.shape[:2]
        state = AttentionState(*(x.reshape(*shape, *x.shape[2:]) for x in found))
        if rules.sinks is None:
            return state
        return merge(state, AttentionState.sink(rules.sinks, state), out=state)

    def _cascade_state(
        self, q: torch.Tensor, place: int, keys: KeySource, rules: LayerRules
    ) -> AttentionState:
        """Attention of one entry, with leading pages read once for all that share them."""
        entry, paged = self.entries[place], cast("PagedKV", keys)
        kind = (place, *_shapes(q, keys))
        cascade = self._cascades.get(kind)
        if cascade is None:
            cascade = self._cascades[kind] = make_cascade(
                q,
                paged,
                cu_seqlens_q=entry.cu_seqlens_q,
                tree_mask=entry.tree_mask,
                levels=entry.way.levels,
                min_saved_keys=self.min_saved_keys,
                min_saved_bytes=self.min_saved_bytes,
            )
        return attend_cascade(
            q,
            paged,
            cascade,
            softcap=rules.softcap,
            scale=rules.scale,
            sinks=rules.sinks,
            tree_mask=entry.tree_mask,
        )


def _are_alike(caches: Sequence[LayerCache]) -> bool:
    """Whether layers keep floats in the same shapes and strides."""
    shapes = {(*x.k.shape, *x.k.stride(), *x.v.shape, *x.v.stride()) for x in caches}
    return len(shapes) == 1 and all(
        cache.is_plain and cache.k.dtype == cache.v.dtype == torch.float32 for cache in caches
    )


def _shapes(q: torch.Tensor, keys: KeySource) -> tuple[object, ...]:
    """What layers that share a plan have in common."""
    return q.shape[1:], q.dtype, keys.num_kv_heads, keys.head_dim_k, keys.head_dim_v
