"""Masks and positions of draft trees on a CPU."""

from __future__ import annotations

from itertools import pairwise

import torch


def make_draft_tree(
    parents: torch.Tensor,  # int32 [num_tokens]
    starts: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor | None,  # int32 [num_seqs]
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A node's row of the mask is its parent's and itself."""
    mask = torch.zeros(len(parents), width, dtype=torch.bool)
    positions = [0] * len(parents)
    above = parents.tolist()
    for seq, (start, stop) in enumerate(pairwise(starts.tolist())):
        context = 0 if seq_lens is None else int(seq_lens[seq]) - (stop - start)
        for node in range(stop - start):
            token, parent = start + node, above[start + node]
            positions[token] = context
            if parent >= 0:
                mask[token] = mask[start + parent]
                positions[token] = positions[start + parent] + 1
            mask[token, node] = True
    return mask, torch.tensor(positions, dtype=torch.int32)
