"""Where the tokens of a step belong, in device memory: all that attention must know."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.cache.kv_cache import LayerCache
from anabranch.plan import Plan, make_plan


@dataclass(slots=True, eq=False)
class Step:
    """Packed tokens of a batch; the plans that layers of one kind share are made by the first."""

    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs], with the tokens of this step
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    slot_mapping: torch.Tensor  # int64 [num_tokens], negative for tokens that are not kept
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
        keys = cache.keys(self.page_table, self.seq_lens)
        append_kv(keys, k, v, self.slot_mapping)
        state = attend(
            q,
            keys,
            cu_seqlens_q=self.cu_seqlens_q,
            window=window,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            plan=self._plan(q, cache, window),
        )
        return state.out

    def _plan(self, q: torch.Tensor, cache: LayerCache, window: int | None) -> Plan | None:
        if q.device.type == "cpu":
            return None
        kind = (window, q.shape, q.dtype, cache.k.shape[2:], cache.v.shape[2:])
        plan = self._plans.get(kind)
        if plan is None:
            keys = cache.keys(self.page_table, self.seq_lens)
            plan = make_plan(q, keys, cu_seqlens_q=self.cu_seqlens_q, window=window)
            self._plans[kind] = plan
        return plan
