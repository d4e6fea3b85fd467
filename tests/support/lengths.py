"""Calls of which only lengths matter, for what divides their work."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, Queries
from anabranch.keys import DenseKV, RaggedKV
from anabranch.rules import Rules


def call_of_lengths(
    num_tokens: int,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    capacity: int,
    window: int | None,
) -> AttendCall:
    """Tokens of one head over keys with these lengths."""
    num_seqs, device = cu_seqlens_q.shape[0] - 1, cu_seqlens_q.device
    q = torch.empty(num_tokens, 1, 1, device=device)
    if cu_seqlens_k is not None:
        k = torch.empty(capacity, 1, 1, device=device)
        keys = RaggedKV(k, k, cu_seqlens_k)
    else:
        k = torch.empty(num_seqs, capacity, 1, 1, device=device)
        keys = DenseKV(k, k, seq_lens)
    queries = Queries(q, cu_seqlens_q, 0, num_seqs)
    return AttendCall(queries, keys, Rules(causal=True, window=window), keys.view())
