"""A batch in sections: neighbouring sequences that one call of attend serves, layer after layer.

A call has one tile size, so an engine keeps decodes apart from prompts. Prompts whose keys are all
new are attended to where these lie, packed, which is faster than through pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from anabranch.attend import attend
from anabranch.keys import KeySource, RaggedKV
from anabranch.plan import Plan, make_plan
from anabranch.state import AttentionState


class LayerRules(NamedTuple):
    """What a layer adds to the rules of a section."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads]


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Neighbouring sequences of similar query lengths, their keys, and which of them are seen.

    Lengths count the keys of the section only, so that a shared prefix and what follows it are two
    sections over the same tokens.
    """

    tokens: slice  # of the batch
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], from 0
    seq_lens: torch.Tensor  # int32 [num_seqs], with the tokens of this step
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    is_fresh: bool = False  # all keys of these sequences are new: pages need not be read
    causal: bool = True  # False: every token sees all of these keys, which come before it
    tree_mask: torch.Tensor | None = None  # bool [num_tokens, width], for drafts that form a tree

    def new_keys(self, k: torch.Tensor, v: torch.Tensor) -> RaggedKV:
        """The keys of sequences that have no others; `k` and `v` are those of the whole batch."""
        return RaggedKV(k[self.tokens], v[self.tokens], self.cu_seqlens_q)


class SectionPlans(dict[tuple[object, ...], tuple[Plan, object]]):
    """Plans that the layers of one pass share, by section, kind of keys and window.

    A plan is kept with the tensors that it is known by, so that no other has their identity.
    """

    def find(
        self,
        section: Section,
        q: torch.Tensor,  # of the section
        keys: KeySource,
        *,
        window: int | None = None,
        fused_merge: bool | None = None,
    ) -> Plan:
        """The plan for queries of a section over such keys, made by the first layer."""
        lengths, (k, v, *_) = keys.lengths, keys.view()
        sizes = (keys.num_kv_heads, keys.head_dim_k, keys.head_dim_v, keys.page_size)
        shapes = (q.shape, q.dtype, keys.kind, k.format, v.format, sizes)
        key = (id(section.cu_seqlens_q), *map(id, lengths), section.causal, window, shapes)
        if key not in self:
            plan = make_plan(
                q,
                keys,
                cu_seqlens_q=section.cu_seqlens_q,
                causal=section.causal,
                window=window,
                tree_mask=section.tree_mask,
                fused_merge=fused_merge,
            )
            self[key] = (plan, (section.cu_seqlens_q, lengths))
        return self[key][0]


def attend_section(
    section: Section,
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k], of the section
    keys: KeySource,
    rules: LayerRules,
    plan: Plan | None,
    out: AttentionState | None = None,
) -> AttentionState:
    """The state of a section's tokens over keys of its sequences."""
    if rules.window is not None and not section.causal:
        raise ValueError(f"a window needs causal attention, got window={rules.window}")
    return attend(
        q,
        keys,
        cu_seqlens_q=section.cu_seqlens_q,
        causal=section.causal,
        tree_mask=section.tree_mask,
        window=rules.window,
        softcap=rules.softcap,
        scale=rules.scale,
        sinks=rules.sinks,
        plan=plan,
        out=out,
    )
