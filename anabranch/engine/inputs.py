"""The model's inputs in persistent device memory, filled anew for each step.

A captured graph reads these buffers at fixed addresses. The host writes into one of two pinned
copies in turn, because the copy of the step in flight may not have been read yet.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.engine.layout import Layout
from anabranch.engine.step import Step

NUM_STAGES = 2


class StepInputs:
    """Buffers for the largest step there can be."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_num_pages: int,
        unseen: torch.Tensor,  # int64: tokens the host has not seen
        device: torch.device,
    ) -> None:
        self.device = device
        self.unseen = unseen
        sizes = {
            "ids": ((max_num_tokens,), torch.int64),
            "sources": ((max_num_tokens,), torch.int64),
            "positions": ((max_num_tokens,), torch.int64),
            "slots": ((max_num_tokens,), torch.int64),
            "logit_rows": ((max_num_tokens,), torch.int64),
            "cu_seqlens": ((max_num_seqs + 1,), torch.int32),
            "seq_lens": ((max_num_seqs,), torch.int32),
            "pages": ((max_num_seqs, max_num_pages), torch.int32),
        }
        pinned = device.type == "cuda"
        self._stages = [
            {
                name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
                for name, (shape, dtype) in sizes.items()
            }
            for _ in range(NUM_STAGES if pinned else 1)
        ]
        self._turn = 0
        self._buffers = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in sizes.items()
        }
        self.ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)

    def load(self, layout: Layout, num_tokens: int, num_seqs: int) -> None:
        """Copy a layout to the device, followed by inert tokens and sequences up to these sizes."""
        self._turn = (self._turn + 1) % len(self._stages)
        stage = {name: tensor.numpy() for name, tensor in self._stages[self._turn].items()}
        _fill(stage["ids"], layout.ids, 0, num_tokens)
        _fill(stage["sources"], layout.sources, -1, num_tokens)
        _fill(stage["positions"], layout.positions, 0, num_tokens)
        _fill(stage["slots"], layout.slots, -1, num_tokens)
        _fill(stage["logit_rows"], layout.logit_rows, 0, len(layout.logit_rows))
        _fill(stage["seq_lens"], layout.seq_lens, 0, num_seqs)
        _fill_bounds(stage["cu_seqlens"], layout, num_tokens, num_seqs)
        for row, pages in zip(stage["pages"], layout.pages, strict=False):
            row[: len(pages)] = pages
        counts = {"cu_seqlens": num_seqs + 1, "seq_lens": num_seqs, "pages": layout.num_seqs}
        counts["logit_rows"] = len(layout.logit_rows)
        for name, source in self._stages[self._turn].items():
            count = counts.get(name, num_tokens)
            self._buffers[name][:count].copy_(source[:count], non_blocking=True)
        self._resolve_ids(num_tokens, bool((layout.sources >= 0).any()))

    def _resolve_ids(self, num_tokens: int, unseen: bool) -> None:
        ids, sources = self._buffers["ids"][:num_tokens], self._buffers["sources"][:num_tokens]
        if unseen:
            known = self.unseen.flatten()[sources.clamp(min=0)]
            torch.where(sources < 0, ids, known, out=self.ids[:num_tokens])
        else:
            self.ids[:num_tokens].copy_(ids)

    def step(self, num_seqs: int, num_tokens: int) -> Step:
        """What attention reads of the buffers."""
        return Step(
            self._buffers["cu_seqlens"][: num_seqs + 1],
            self._buffers["seq_lens"][:num_seqs],
            self._buffers["pages"][:num_seqs],
            self._buffers["slots"][:num_tokens],
        )

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Of every token in its sequence."""
        return self._buffers["positions"][:num_tokens]

    def logit_rows(self, count: int) -> torch.Tensor:
        """Tokens whose logits are wanted."""
        return self._buffers["logit_rows"][:count]


def _fill(target: NDArray[np.integer], values: NDArray[np.int64], rest: int, size: int) -> None:
    target[: len(values)] = values
    target[len(values) : size] = rest


def _fill_bounds(
    target: NDArray[np.integer], layout: Layout, num_tokens: int, num_seqs: int
) -> None:
    target[: layout.num_seqs + 1] = layout.cu_seqlens
    missing = num_seqs - layout.num_seqs
    if missing:  # inert sequences share the inert tokens evenly
        steps = np.arange(1, missing + 1)
        spare = num_tokens - layout.num_tokens
        target[layout.num_seqs + 1 : num_seqs + 1] = layout.num_tokens + steps * spare // missing
