"""attend_latent_prompt(): many queries over latent keys, expanded piece by piece under a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from anabranch.attend import attend
from anabranch.keys import LatentKV, RaggedKV
from anabranch.merge import merge
from anabranch.shapes import Sizes
from anabranch.state import AttentionState
from anabranch.up_projection import UpProjection

MIB = 1 << 20
MIN_PIECE = 128  # keys and queries: smaller products would waste a GPU
STATE_SHARE = 4  # a quarter of the budget is for the state of a piece
INDEX_BYTES = 64  # a key, for the int64 tensors that find its row


class Workspace(NamedTuple):
    """How much of a prompt is handled at once."""

    num_keys: int
    num_queries: int


class ContextPiece(NamedTuple):
    """Keys of neighbouring sequences: all that one has in the piece lies at `starts`."""

    first_seq: int
    starts: list[int]
    counts: list[int]


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
) -> AttentionState:
    """Causal attention of prompts, or pieces of prompts, with the keys and values of every head.

    q             [num_tokens, num_heads, head_dim_nope + rotary], not absorbed
    rows          [num_tokens, rank + rotary]: the rows of these tokens
    keys          pages that hold the rows before them
    q_lens        tokens of each sequence; together at most num_tokens
    context_lens  rows of each sequence before its tokens, on the host as the budget needs them
    scale         of the scores, 1 / sqrt(head_dim) with the model's factor

    Rows are expanded in pieces, each of which gives a state, and states are merged. Whatever the
    lengths, at most `max_workspace_mib` is allocated beside the result and what attend() and
    merge() use themselves. Returns the state of [num_tokens, num_heads, head_dim_v].
    """
    _check(q, rows, keys, up, q_lens, context_lens)
    space = size_workspace(up, rows.shape[1], max_workspace_mib)
    shape = (*q.shape[:2], up.head_dim_v)
    state = AttentionState.empty(shape, dtype=q.dtype, device=q.device)
    bounds = [0, *accumulate(q_lens)]
    # The tensors of a piece are freed as a function returns, before the next piece is expanded.
    for piece in _context_pieces(context_lens, space.num_keys):
        seqs = slice(piece.first_seq, piece.first_seq + len(piece.counts) + 1)
        k_bounds = [0, *accumulate(piece.counts)]
        _attend_earlier(
            q, up.expand(_read(keys, piece)), bounds[seqs], k_bounds, space, scale, state
        )
    step = min(space)
    for start in range(0, bounds[-1], step):
        stop = min(start + step, bounds[-1])
        _attend_new(q, up.expand(rows[start:stop]), bounds, start, stop, space, scale, state)
    return state


def size_workspace(up: UpProjection, width: int, max_workspace_mib: float) -> Workspace:
    """Keys and queries that a budget allows for rows of this width."""
    budget = max_workspace_mib * MIB
    a_key = up.bytes_per_key(width) + INDEX_BYTES
    a_query = up.weight.shape[0] * (up.head_dim_v * up.weight.element_size() + 4)
    space = Workspace(
        int(budget * (STATE_SHARE - 1) / STATE_SHARE / a_key), int(budget / STATE_SHARE / a_query)
    )
    if min(space) < MIN_PIECE:
        need = MIN_PIECE * STATE_SHARE * max(a_key / (STATE_SHARE - 1), a_query) / MIB
        raise ValueError(
            f"max_workspace_mib {max_workspace_mib} is too small for a piece of {MIN_PIECE} keys, "
            f"which needs {need:.1f}"
        )
    return space


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


def _context_pieces(context_lens: Sequence[int], most: int) -> Iterator[ContextPiece]:
    """Cut the contexts of all sequences, one after the other, every `most` rows."""
    piece, room = ContextPiece(0, [], []), most
    for seq, length in enumerate(context_lens):
        start = 0
        while True:
            count = min(length - start, room)
            piece.starts.append(start)
            piece.counts.append(count)
            start, room = start + count, room - count
            if start == length:
                break
            yield piece
            piece, room = ContextPiece(seq, [], []), most
    if any(piece.counts):
        yield piece


def _read(keys: LatentKV, piece: ContextPiece) -> torch.Tensor:
    """The rows of a piece [num_keys, width]."""
    lengths = _index(piece.counts, keys.device).long()
    seqs = torch.arange(len(piece.counts), device=keys.device)
    total = sum(piece.counts)
    seqs = seqs.repeat_interleave(lengths, output_size=total)
    first = [
        start - sum(piece.counts[:seq]) for seq, start in enumerate(piece.starts)
    ]  # added to the place in the piece
    positions = torch.arange(total, device=keys.device) + _index(first, keys.device)[seqs]
    return keys.read_rows(seqs + piece.first_seq, positions)


def _attend_new(
    q: torch.Tensor,
    expanded: tuple[torch.Tensor, torch.Tensor],
    bounds: list[int],
    start: int,
    stop: int,
    space: Workspace,
    scale: float,
    state: AttentionState,
) -> None:
    """Merge into `state` what tokens see of the new tokens from `start` to `stop`."""
    k, v = expanded
    starts = _index([min(max(bound, start), stop) - start for bound in bounds], q.device)
    own = attend(q[start:stop], RaggedKV(k, v, starts), cu_seqlens_q=starts, scale=scale)
    merge(part := _rows(state, start, stop), own, out=part)
    del own
    end = min(bound for bound in bounds if bound >= stop)
    if end > stop:  # the last sequence goes on after the piece
        begin = max(bound for bound in bounds if bound < stop)
        cut = max(begin - start, 0)
        earlier = (k[cut:], v[cut:])
        _attend_earlier(q, earlier, [stop, end], [0, len(k) - cut], space, scale, state)


def _attend_earlier(
    q: torch.Tensor,
    expanded: tuple[torch.Tensor, torch.Tensor],
    q_bounds: list[int],  # tokens of the sequences in question
    k_bounds: list[int],
    space: Workspace,
    scale: float,
    state: AttentionState,
) -> None:
    """Merge into `state` what tokens see of keys that all come before them."""
    source = RaggedKV(*expanded, _index(k_bounds, q.device))
    for start in range(q_bounds[0], q_bounds[-1], space.num_queries):
        stop = min(start + space.num_queries, q_bounds[-1])
        starts = [min(max(bound, start), stop) - start for bound in q_bounds]
        seen = attend(
            q[start:stop],
            source,
            cu_seqlens_q=_index(starts, q.device),
            causal=False,
            scale=scale,
        )
        merge(part := _rows(state, start, stop), seen, out=part)
        del seen


def _rows(state: AttentionState, start: int, stop: int) -> AttentionState:
    return AttentionState(state.out[start:stop], state.lse[start:stop])


def _index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    pinned = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
