"""Attention of prompts to keys that are expanded for some heads, and in pieces, under a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from anabranch.attend import attend
from anabranch.compositions.prompt_pieces import PromptLayout, PromptPiece, make_prompt_layout
from anabranch.compositions.prompt_workspace import ExpandedKeys, PromptLens
from anabranch.compositions.sections import LayerRules
from anabranch.keys import PagedSource, RaggedKV
from anabranch.merge import merge
from anabranch.shapes import Sizes
from anabranch.state import AttentionState


class HeadGroup(NamedTuple):
    """Expanded keys of a piece, in memory that the next group takes over."""

    heads: slice  # of queries
    k: torch.Tensor  # [num_keys, heads of keys, head_dim_k]
    v: torch.Tensor


class KeyExpander(Protocol):
    """What makes keys and values of every head from what a cache keeps."""

    @property
    def expanded(self) -> ExpandedKeys:
        """How large they are."""
        ...

    def groups(self, piece: PromptPiece, layout: PromptLayout) -> Iterator[HeadGroup]:
        """Those of a piece, one group of heads after the other."""
        ...


def attend_expanded(
    q: torch.Tensor,
    expander: KeyExpander,
    lens: PromptLens,
    rules: LayerRules,
    *,
    max_workspace_mib: float,
    layout: PromptLayout | None,
) -> AttentionState:
    """The state of queries [num_tokens, num_heads, dim], by a layout that is given or made."""
    if layout is None:
        given = lens._asdict()
        layout = make_prompt_layout(expander.expanded, **given, max_workspace_mib=max_workspace_mib)
    layout.check(lens, expander.expanded)
    out = q.new_empty(*q.shape[:2], expander.expanded.head_dim_v)
    state = AttentionState(out, out.new_empty(q.shape[:2], dtype=torch.float32))
    num_tokens = sum(lens.q_lens)
    if num_tokens < len(q):
        out[num_tokens:] = 0
        state.lse[num_tokens:] = -torch.inf
    for piece in layout.pieces:  # its tensors are freed before the next one is read
        _attend_piece(q, expander, piece, layout, rules, state)
    return state


def check_lens(
    q: torch.Tensor, keys: PagedSource, q_lens: Sequence[int], context_lens: Sequence[int]
) -> None:
    """Refuse lengths that queries, or the pages that hold the context, do not have."""
    sizes = Sizes()
    for name, lens in (("q_lens", q_lens), ("context_lens", context_lens)):
        sizes.bind("num_seqs", len(lens), name)
        if any(length < 0 for length in lens):
            raise ValueError(f"{name} must not be negative, got {list(lens)}")
    sizes.bind("num_seqs", keys.num_seqs, "keys")
    if sum(q_lens) > len(q):
        raise ValueError(f"q_lens sum up to {sum(q_lens)}, but q has {len(q)} tokens")
    if max(context_lens, default=0) > keys.capacity:
        raise ValueError(
            f"context_lens has {max(context_lens)}, but a row of the page table holds "
            f"{keys.capacity} keys"
        )


def _attend_piece(
    q: torch.Tensor,
    expander: KeyExpander,
    piece: PromptPiece,
    layout: PromptLayout,
    rules: LayerRules,
    state: AttentionState,
) -> None:
    """Add to `state` what its tokens see of a piece, one group of heads after the other."""
    starts = [layout.index[call.q_bounds] for call in piece.calls]
    sources: list[RaggedKV] = []
    for heads, k, v in expander.groups(piece, layout):
        sources = sources or [RaggedKV(k, v, layout.index[call.k_bounds]) for call in piece.calls]
        for call, source, start in zip(piece.calls, sources, starts, strict=True):
            part = AttentionState(state.out[call.tokens, heads], state.lse[call.tokens, heads])
            seen = part if call.is_first else _new_state(part)
            queries = q[call.tokens, heads]
            options: Any = {"cu_seqlens_q": start, "causal": call.causal, "scale": rules.scale}
            options |= {"window": rules.window, "softcap": rules.softcap}
            if rules.sinks is not None and call.is_first:  # a sink is a key, to be seen once
                options["sinks"] = rules.sinks[heads]
            # No name keeps the plan: its parts are freed before those of the next are allocated.
            attend(
                queries,
                source,
                **options,
                plan=layout.plan(call, queries, source, start),
                out=seen,
            )
            if not call.is_first:
                merge(part, seen, out=part)
            del seen


def _new_state(like: AttentionState) -> AttentionState:
    return AttentionState(*(x.new_empty(x.shape) for x in like))
