"""Banning tokens by masks of a bit each, in NumPy: the bits are spread out, then compared.

On one thread: a row takes tens of microseconds, less than waking others.
"""

from __future__ import annotations

import numpy as np
import torch


def mask_tokens(scores: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Set scores to -inf, in these rows, where the bit of int32 `words` [rows, words] is 0."""
    vocab_size = scores.shape[1]
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    banned = bits[:, :vocab_size] == 0
    table = scores.numpy()
    for row, ban in zip(rows.tolist(), banned, strict=True):
        np.copyto(table[row], -np.inf, where=ban)
