"""Where the tokens of a step belong, in device memory: all that attention must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.cache.kv_cache import LayerCache
from anabranch.kernels.cpu.decode import NewKeys, attend_pages, reads_pages
from anabranch.keys import KeySource, RaggedKV
from anabranch.plan import Plan, make_plan


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
    _in_place: dict[tuple[object, ...], bool] = field(
        default_factory=dict[tuple[object, ...], bool]
    )

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
        if self._reads_pages(q, k, v, cache, softcap, sinks):
            keys = cache.keys(first.page_table, first.seq_lens)
            new = NewKeys(k, v, self.slot_mapping)
            return attend_pages(
                q, keys, first.cu_seqlens_q, causal=True, window=window, scale=scale, new=new
            ).out
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
            first = self.groups[0]
            keys, starts = first.keys(k, v, cache), first.cu_seqlens_q
            bounds = cast("list[int]", starts.tolist())  # pyright: ignore[reportUnknownMemberType]
            options: Any = {"softcap": softcap, "tree_mask": None}
            known = len(self.groups) == 1 and reads_pages(q, keys, starts, bounds, **options)
            known = known and self.slot_mapping.dtype == torch.int64
            self._in_place[shapes] = known
        return known and k.stride(-1) == v.stride(-1) == 1

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
