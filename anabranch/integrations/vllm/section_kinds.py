"""The kinds of sections that steps outside of graphs may hold, to be compiled before requests."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.query_sections import Bounds

MANY_TOKENS = 8192


def section_kinds(
    *, max_tokens: int, max_seqs: int, decode_tokens: int, table: torch.Tensor
) -> Iterator[BatchMetadata]:
    """Batches of one section each; `table` has the width and device of a batch's own.

    Tiles are selected by queries and sequences, whose powers of two meet every kind; those of more
    than MANY_TOKENS are the same for all.
    """
    max_tokens = min(max_tokens, MANY_TOKENS)
    prompts = [size for size in _powers_of_two(max_tokens) if size > decode_tokens]
    for q_len in sorted({1, decode_tokens, *prompts}):
        for num_seqs in _powers_of_two(min(max_seqs, max_tokens // q_len)):
            for are_new in (False, True) if q_len > decode_tokens else (False,):
                yield _batch(num_seqs, q_len, table, are_new)


def _powers_of_two(limit: int) -> list[int]:
    """Up to a limit, which is itself the last."""
    powers = [1 << bits for bits in range(limit.bit_length())]
    return sorted({*powers, limit}) if limit else []


def _batch(num_seqs: int, q_len: int, table: torch.Tensor, are_new: bool) -> BatchMetadata:
    num_tokens = num_seqs * q_len
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=table.device) * q_len
    return BatchMetadata(
        starts,
        starts.diff(),
        table.new_zeros(num_seqs, table.shape[1]),
        [Bounds(slice(0, num_seqs), slice(0, num_tokens), are_new)],
        num_tokens=num_tokens,
    )
