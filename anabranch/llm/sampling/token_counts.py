"""Tokens in the prompt and output of each request, in dense tables on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anabranch.llm.sampling.batch import upload


class TokenCounts:
    """[num_rows, vocab] tables, allocated for the first request that needs them."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        shape = num_rows, vocab_size
        self.outputs = torch.zeros(shape, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)

    def reset(self, row: int, prompt: Sequence[int], outputs: Sequence[int]) -> None:
        """Begins a row anew with these tokens."""
        tokens = {"prompt": np.array(prompt, np.int64), "outputs": np.array(outputs, np.int64)}
        on_device = upload(tokens, self.outputs.device)
        self.in_prompt[row].zero_().index_fill_(0, on_device["prompt"], True)
        row_counts = self.outputs[row : row + 1].zero_()
        self.count(row_counts, torch.zeros_like(on_device["outputs"]), on_device["outputs"])

    def count(self, counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Adds one to `counts` [num, vocab] for each pair of a row and a token."""
        ones = torch.ones(rows.shape, dtype=counts.dtype, device=counts.device)
        counts.view(-1).index_add_(0, rows * self.vocab_size + tokens, ones)

    def emit(self, rows: Tensor, tokens: Tensor, num_emitted: Tensor) -> None:
        """Counts the first `num_emitted` of `tokens` [num_seqs, width] as output."""
        is_emitted = torch.arange(tokens.shape[1], device=tokens.device) < num_emitted.unsqueeze(1)
        places = rows.unsqueeze(1) * self.vocab_size + tokens
        self.outputs.view(-1).index_add_(0, places.view(-1), is_emitted.int().view(-1))
