"""attend_quantised_prompt(): many queries over a quantised cache, decoded under a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anabranch.compositions.expanded_prompt import HeadGroup, attend_expanded, check_lens
from anabranch.compositions.prompt_pieces import PromptLayout, PromptPiece, cut_prompts
from anabranch.compositions.prompt_workspace import ExpandedKeys, PromptLens, find_workspace
from anabranch.compositions.sections import LayerRules
from anabranch.implementations import load_implementation
from anabranch.keys import PagedKV
from anabranch.launches.prepare import PreparedLaunches, prepare
from anabranch.launches.recorder import Kinds, describe, record
from anabranch.shapes import Sizes, check_device, check_dtype
from anabranch.state import AttentionState

EXPANSIONS = Kinds[tuple[Any, ...], PreparedLaunches | None]()  # None: run the long way
# Query rows that meet a decoded key on average, from which decoding it first pays. By the times of
# a chunk of 1024 tokens at 32768 keys, decoding a key takes a GPU as long as 115 rows (fp8) to 177
# (fp8_tensor) save; the host takes 60 us more for a call.
MIN_ROWS = 512


def attend_quantised_prompt(
    q: torch.Tensor,
    keys: PagedKV,
    *,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    max_workspace_mib: float = 256,
    layout: PromptLayout | None = None,
    impl: str | None = None,
) -> AttentionState:
    """What attend(q, keys) returns, by decoding keys once and attending to the result.

    q             [num_tokens, num_heads, head_dim_k]
    keys          pages that hold the keys of contexts and of these tokens; `keys.seq_lens` is not
                  read
    q_lens        tokens of each sequence; together at most num_tokens
    context_lens  keys of each sequence before its tokens, on the host as the budget needs them
    layout        from make_prompt_layout() with the same lengths, window and budget, to be shared
                  by the layers of a step
    impl          "torch" or "triton", which decodes; by default the device decides

    Decoded numbers are rounded to the dtype of the queries. Keys that do not fit are cut into
    pieces, each of which gives a state, and states are merged. Whatever the lengths, at most
    `max_workspace_mib` is allocated beside the result.
    """
    _check(q, keys)
    check_lens(q, keys, q_lens, context_lens)
    longest = max((sum(each) for each in zip(q_lens, context_lens, strict=True)), default=0)
    if longest > keys.capacity:
        raise ValueError(
            f"a sequence has {longest} keys with its tokens, but a row of the page table holds "
            f"{keys.capacity}"
        )
    expander = PageExpander(keys, q.shape[1], impl)
    lens = PromptLens(tuple(q_lens), tuple(context_lens), window)
    rules = LayerRules(q.shape[2] ** -0.5 if scale is None else scale, window, softcap, sinks)
    given: Any = {"max_workspace_mib": max_workspace_mib, "layout": layout}
    return attend_expanded(q, expander, lens, rules, **given)


def _check(q: torch.Tensor, keys: PagedKV) -> None:
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads head_dim_k")
    sizes.bind("head_dim_k", keys.head_dim_k, "keys")
    check_dtype("q", q, (keys.dtype,))
    check_device("q", q, keys.device)
    if q.shape[1] % keys.num_kv_heads:
        raise ValueError(f"{q.shape[1]} heads of q cannot share {keys.num_kv_heads} heads of keys")


@dataclass(frozen=True, slots=True, eq=False)
class PageExpander:
    """Decodes pages."""

    keys: PagedKV
    num_heads: int  # of queries
    impl: str | None = None

    @property
    def expanded(self) -> ExpandedKeys:
        """Keys and values in the dtype of the queries."""
        keys = self.keys
        heads = keys.num_kv_heads, self.num_heads // keys.num_kv_heads
        return ExpandedKeys(*heads, keys.head_dim_k, keys.head_dim_v, keys.dtype, keys.device)

    def prefers_expanded(self, lens: PromptLens) -> bool:
        """Whether attending to decoded keys takes less time, the decoding included.

        Only the Hopper kernel is faster than the one that reads codes.
        """
        if not self.expanded.runs_on_hopper:
            return False
        num_keys = sum(lens.key_lens())
        return bool(num_keys) and self.expanded.group * lens.num_pairs() >= MIN_ROWS * num_keys

    def preferred_layout(
        self, lens: PromptLens, max_workspace_mib: float, fused_merge: bool | None = None
    ) -> PromptLayout | None:
        """How to decode keys, where that takes less time and the budget is not too small."""
        if not self.prefers_expanded(lens):
            return None
        space = find_workspace(self.expanded, lens, max_workspace_mib, fused_merge)
        return space and cut_prompts(lens, space, self.keys.device, fused_merge)

    def groups(self, piece: PromptPiece, layout: PromptLayout) -> Iterator[HeadGroup]:
        """A launch for each group of heads."""
        expanded, num_heads = self.expanded, layout.num_heads
        k, v = expanded.allocate(piece.num_keys, num_heads)
        for first in range(0, expanded.num_heads, num_heads):
            self._expand(layout.index[piece.places], first, k, v)
            group = expanded.group
            yield HeadGroup(slice(first * group, (first + num_heads) * group), k, v)

    def _expand(self, spans: torch.Tensor, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """As `append_kv` writes: launched again where calls of the kind were recorded before."""
        keys, kind, identity = self.keys, None, self.keys.identity
        if identity is not None and (described := describe((spans, k, v))) is not None:
            kind = (identity.kind, described, first, self.impl)
            known = EXPANSIONS.get(kind)
            if known is not None:
                run, launches, _ = known
                run(launches, (spans, k, v, *identity.tensors))
                return
        expand = load_implementation("expand_pages", self.impl, keys.device).expand_pages
        given = keys.stores(), keys.page_table, spans, first, k, v
        if kind is None or identity is None or kind in EXPANSIONS:
            expand(*given)
            return
        with record(keys.device) as recording:
            expand(*given)
        EXPANSIONS.keep(kind, prepare(recording, (spans, k, v), identity.tensors))
