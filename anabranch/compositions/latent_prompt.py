"""attend_latent_prompt(): many queries over latent keys, expanded under a budget of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anabranch.attend import attend
from anabranch.compositions.prompt_pieces import (
    KeySpan,
    PromptLayout,
    PromptPiece,
    make_prompt_layout,
)
from anabranch.compositions.prompt_workspace import PromptLens
from anabranch.compositions.up_projection import UpProjection
from anabranch.keys import LatentKV, RaggedKV
from anabranch.merge import merge
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
    _check(q, rows, keys, up, q_lens, context_lens)
    if layout is None:
        layout = make_prompt_layout(
            up,
            rows.shape[1],
            q_lens=q_lens,
            context_lens=context_lens,
            page_size=keys.page_size,
            max_workspace_mib=max_workspace_mib,
        )
    else:
        layout.check(PromptLens(tuple(q_lens), tuple(context_lens)), q.shape[1])
    out = q.new_empty(*q.shape[:2], up.head_dim_v)
    state = AttentionState(out, out.new_empty(q.shape[:2], dtype=torch.float32))
    if sum(q_lens) < len(q):
        out[sum(q_lens) :] = 0
        state.lse[sum(q_lens) :] = -torch.inf
    for piece in layout.pieces:  # its tensors are freed before the next one is read
        _attend_piece(q, _read(keys, rows, piece, layout, up), up, piece, layout, scale, state)
    return state


def _check(
    q: torch.Tensor,
    rows: torch.Tensor,
    keys: LatentKV,
    up: UpProjection,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
) -> None:
    sizes = Sizes()
    sizes.match("q", q, "num_tokens num_heads dim")
    sizes.match("rows", rows, "num_tokens head_dim_k")
    sizes.bind("head_dim_k", keys.head_dim_k, "keys")
    up.check(q, rows.shape[1])
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
            f"{keys.capacity} rows"
        )


def _read(
    keys: LatentKV, rows: torch.Tensor, piece: PromptPiece, layout: PromptLayout, up: UpProjection
) -> torch.Tensor:
    """The rows of a piece [num_keys, width], of contexts and of new tokens."""
    num_keys = sum(span.stop - span.start for span in piece.spans)
    first = piece.spans[0]
    if all(span.start >= span.context_len for span in piece.spans):
        token = first.first_token + first.start - first.context_len
        return rows[token : token + num_keys]
    skipped = first.start % keys.page_size  # pages are copied whole
    buffer = rows.new_empty(skipped + num_keys + keys.page_size, rows.shape[1])
    most = num_keys
    if keys.cache_scales is not None:  # decoded where keys will be expanded
        room = up.bytes_per_key(rows.shape[1], layout.num_heads) * num_keys - buffer.nbytes
        most = room // (DECODE_BYTES * rows.shape[1])
    place = skipped
    for span in piece.spans:
        _read_context(keys, span, buffer, place, most)
        new = slice(max(span.start, span.context_len), span.stop)
        if new.start < new.stop:  # over the end of the last page
            token = span.first_token - span.context_len
            start, count = place + new.start - span.start, new.stop - new.start
            buffer[start : start + count] = rows[token + new.start : token + new.stop]
        place += span.stop - span.start
    return buffer[skipped:place]


def _read_context(
    keys: LatentKV, span: KeySpan, buffer: torch.Tensor, place: int, most: int
) -> None:
    """Copy the context rows of a span, in whole pages, `most` rows at a time."""
    size, stop = keys.page_size, min(span.stop, span.context_len)
    place -= span.start % size
    first, last = span.start // size, -(-stop // size)
    step = max(most // size, 1)
    for page in range(first, last, step):
        pages = slice(page, min(page + step, last))
        start = place + (page - first) * size
        keys.read_pages(span.seq, pages, buffer[start : start + (pages.stop - page) * size])


def _attend_piece(
    q: torch.Tensor,
    latent: torch.Tensor,
    up: UpProjection,
    piece: PromptPiece,
    layout: PromptLayout,
    scale: float,
    state: AttentionState,
) -> None:
    """Add to `state` what its tokens see of a piece, one group of heads after the other."""
    k, v = up.new_expanded(latent, layout.num_heads)
    sources = [RaggedKV(k, v, layout.index[call.k_bounds]) for call in piece.calls]
    starts = [layout.index[call.q_bounds] for call in piece.calls]
    for first in range(0, q.shape[1], k.shape[1]):
        heads = slice(first, first + k.shape[1])
        up.expand_heads(latent, heads, k, v)
        for call, source, start in zip(piece.calls, sources, starts, strict=True):
            part = AttentionState(state.out[call.tokens, heads], state.lse[call.tokens, heads])
            seen = part if call.is_first else _new_state(part)
            options: Any = {"cu_seqlens_q": start, "causal": call.causal, "scale": scale}
            queries = q[call.tokens, heads]
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
