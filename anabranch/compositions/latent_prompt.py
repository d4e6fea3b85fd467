"""attend_latent_prompt(): many queries over latent keys, expanded under a budget of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anabranch.compositions.expanded_prompt import HeadGroup, attend_expanded, check_lens
from anabranch.compositions.prompt_pieces import KeySpan, PromptLayout, PromptPiece
from anabranch.compositions.prompt_workspace import ExpandedKeys, PromptLens
from anabranch.compositions.sections import LayerRules
from anabranch.compositions.up_projection import UpProjection
from anabranch.keys import LatentKV
from anabranch.shapes import Sizes
from anabranch.state import AttentionState

DECODE_BYTES = 16  # a column of a row, while rows in a quantised cache are decoded


def attend_latent_prompt(
    q: torch.Tensor,
    rows: torch.Tensor,
    keys: LatentKV,
    up: UpProjection,
    *,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    max_workspace_mib: float = 256,
    layout: PromptLayout | None = None,
) -> AttentionState:
    """Causal attention of prompts, or pieces of prompts, with the keys and values of every head.

    q             [num_tokens, num_heads, head_dim_nope + rotary], not absorbed
    rows          [num_tokens, rank + rotary]: the rows of these tokens
    keys          pages that hold the rows before them
    q_lens        tokens of each sequence; together at most num_tokens
    context_lens  rows of each sequence before its tokens, on the host as the budget needs them
    scale         of the scores, 1 / sqrt(head_dim) with the model's factor
    layout        from make_prompt_layout() with the same lengths and budget, to be shared by the
                  layers of a step

    Rows are expanded for some heads at a time. Sequences whose keys do not fit even so are cut
    into pieces, each of which gives a state, and states are merged. Whatever the lengths, at most
    `max_workspace_mib` is allocated beside the result. Returns the state of
    [num_tokens, num_heads, head_dim_v].
    """
    _check(q, rows, keys, up)
    check_lens(q, keys, q_lens, context_lens)
    expander = LatentExpander(rows, keys, up)
    lens = PromptLens(tuple(q_lens), tuple(context_lens))
    given: Any = {"max_workspace_mib": max_workspace_mib, "layout": layout}
    return attend_expanded(q, expander, lens, LayerRules(scale), **given)


def _check(q: torch.Tensor, rows: torch.Tensor, keys: LatentKV, up: UpProjection) -> None:
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads dim")
    sizes.match("rows", rows, "num_tokens head_dim_k")
    sizes.bind("head_dim_k", keys.head_dim_k, "keys")
    up.check(q, rows.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class LatentExpander:
    """Expands rows, of contexts from their pages and of new tokens as they are given."""

    rows: torch.Tensor  # [num_tokens, rank + rotary]
    keys: LatentKV
    up: UpProjection

    @property
    def expanded(self) -> ExpandedKeys:
        """Keys and values of every head."""
        return self.up.expanded(self.rows.shape[1], self.keys.page_size)

    def groups(self, piece: PromptPiece, layout: PromptLayout) -> Iterator[HeadGroup]:
        """Products of a piece's rows with the weights of some heads."""
        latent = self._read(piece, layout)
        k, v = self.up.new_expanded(latent, layout.num_heads)
        for first in range(0, self.up.weight.shape[0], layout.num_heads):
            heads = slice(first, first + layout.num_heads)
            self.up.expand_heads(latent, heads, k, v)
            yield HeadGroup(heads, k, v)

    def _read(self, piece: PromptPiece, layout: PromptLayout) -> torch.Tensor:
        """The rows of a piece [num_keys, width], of contexts and of new tokens."""
        keys, rows, num_keys = self.keys, self.rows, piece.num_keys
        first = piece.spans[0]
        if all(span.start >= span.context_len for span in piece.spans):
            token = first.first_token + first.start - first.context_len
            return rows[token : token + num_keys]
        skipped = first.start % keys.page_size  # pages are copied whole
        buffer = rows.new_empty(skipped + num_keys + keys.page_size, rows.shape[1])
        most = num_keys
        if keys.cache_scales is not None:  # decoded where keys will be expanded
            room = self.expanded.bytes_per_key(layout.num_heads) * num_keys - buffer.nbytes
            most = room // (DECODE_BYTES * rows.shape[1])
        place = skipped
        for span in piece.spans:
            self._read_context(span, buffer, place, most)
            new = slice(max(span.start, span.context_len), span.stop)
            if new.start < new.stop:  # over the end of the last page
                token = span.first_token - span.context_len
                start, count = place + new.start - span.start, new.stop - new.start
                buffer[start : start + count] = rows[token + new.start : token + new.stop]
            place += span.num_keys
        return buffer[skipped:place]

    def _read_context(self, span: KeySpan, buffer: torch.Tensor, place: int, most: int) -> None:
        """Copy the context rows of a span, in whole pages, `most` rows at a time."""
        size, stop = self.keys.page_size, min(span.stop, span.context_len)
        place -= span.start % size
        first, last = span.start // size, -(-stop // size)
        step = max(most // size, 1)
        for page in range(first, last, step):
            pages = slice(page, min(page + step, last))
            start = place + (page - first) * size
            rows = buffer[start : start + (pages.stop - page) * size]
            self.keys.read_pages(span.seq, pages, rows)
