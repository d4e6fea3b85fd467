"""Sequences brought together into batches whose keys end in the same column."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from anabranch.keys import KeyColumns, KeySource

MAX_SHORT_WORK = 1 << 20  # multiply-adds of a sequence that cost about as much as a call
MAX_PADDED_KEYS = 64  # that a short sequence may lack to the longest of its batch,
MAX_PADDED_SHARE = 0.25  # or this share of the longest


class Batch(NamedTuple):
    """Sequences of one query length; shorter ones have keys to ignore in front of their own."""

    tokens: slice | torch.Tensor  # which rows of the packed queries these are
    q: torch.Tensor  # [num_seqs, q_len, num_heads, head_dim_k]
    k_len: int
    columns: KeyColumns
    starts: torch.Tensor | None  # int64 [num_seqs], column of the first key; None if all are 0
    log_weights: torch.Tensor | None = None  # float32 [num_seqs, k_len], added to logits


def make_batches(
    q: torch.Tensor, keys: KeySource, bounds: list[int], window: int | None, join_long: bool
) -> Iterator[Batch]:
    """Every sequence that has queries and keys, without the keys before any query's window."""
    q_lens = [stop - start for start, stop in pairwise(bounds)]
    k_lens = keys.key_lens()
    seen = k_lens
    if window is not None:
        seen = [min(k, q_len + window - 1) for q_len, k in zip(q_lens, k_lens, strict=True)]
    max_short = MAX_SHORT_WORK // (q.shape[1] * (q.shape[2] + keys.head_dim_v))
    for seqs in group_sequences(q_lens, seen, max_short, join_long):
        q_len, k_len = q_lens[seqs[0]], max(seen[seq] for seq in seqs)
        starts = None
        if any(seen[seq] < k_len for seq in seqs):
            starts = torch.tensor([k_len - seen[seq] for seq in seqs])
        shape = (seqs, [k_lens[seq] for seq in seqs], k_len, starts)
        columns, weights = keys.columns(*shape), keys.column_weights(*shape)
        tokens = _tokens([bounds[seq] for seq in seqs], q_len)
        rows = q if tokens == slice(0, len(q)) else q[tokens]
        yield Batch(tokens, rows.view(-1, q_len, *q.shape[1:]), k_len, columns, starts, weights)


def group_sequences(
    q_lens: list[int], k_lens: list[int], max_short: int, join_long: bool
) -> list[list[int]]:
    """Sequences to compute together: short ones of nearly equal length, equal long neighbours.

    A sequence is short up to `max_short` query-key pairs.
    """
    order = [seq for seq, q_len in enumerate(q_lens) if q_len > 0 and k_lens[seq] > 0]
    order.sort(key=lambda seq: (q_lens[seq], -k_lens[seq]))
    groups: list[list[int]] = []

    def joins(seq: int, group: list[int]) -> bool:
        q_len, k_len, longest = q_lens[seq], k_lens[seq], k_lens[group[0]]
        if q_lens[group[0]] != q_len:
            return False
        if q_len * longest > max_short or q_len > k_len:
            return join_long and k_len == longest and seq == group[-1] + 1
        return longest - k_len <= max(MAX_PADDED_KEYS, MAX_PADDED_SHARE * longest)

    for seq in order:
        if groups and joins(seq, groups[-1]):
            groups[-1].append(seq)
        else:
            groups.append([seq])
    return [sorted(group) for group in groups]


def _tokens(firsts: list[int], q_len: int) -> slice | torch.Tensor:
    if all(b - a == q_len for a, b in pairwise(firsts)):
        return slice(firsts[0], firsts[-1] + q_len)
    return (torch.tensor(firsts)[:, None] + torch.arange(q_len)).flatten()
