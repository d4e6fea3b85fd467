"""The model's inputs in persistent device memory, filled anew for each step by two copies.

A captured graph reads these buffers at fixed addresses. The host writes into one of several
pinned copies in turn, because those of steps in flight may not have been read yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.engine.layout import Layout
from anabranch.engine.step import Group, Step

NUM_STAGES = 8  # a draft model runs several times in a step
INT32 = ("cu_seqlens", "cu_long", "seq_lens", "long_lens")
ALIGNED = 4  # every row of the page table begins at 16 bytes: kernels are compiled for that
Views = dict[str, torch.Tensor]


class StepInputs:
    """Buffers for steps of up to some number of tokens and sequences."""

    def __init__(
        self, *, max_num_tokens: int, max_num_seqs: int, max_num_pages: int, device: torch.device
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.max_num_seqs = max_num_seqs
        self._num_pages = max_num_pages
        on_gpu = device.type == "cuda"
        sizes = {
            "ids": max_num_tokens,
            "sources": max_num_tokens,
            "positions": max_num_tokens,
            "slots": max_num_tokens,
            "logit_rows": max_num_tokens,
            "cu_seqlens": max_num_seqs + 1,
            "cu_long": max_num_seqs + 1,
            "seq_lens": max_num_seqs,
            "long_lens": max_num_seqs,
        }
        pages = (max_num_seqs, -(-max_num_pages // ALIGNED) * ALIGNED)
        self._stages = [
            _Buffers.make(sizes, pages, torch.device("cpu"), pinned=on_gpu)
            for _ in range(NUM_STAGES if on_gpu else 1)
        ]
        self._read: list[torch.cuda.Event | None] = [None] * len(self._stages)
        self._turn = 0
        self._device = _Buffers.make(sizes, pages, device, pinned=False)

    def load(self, layout: Layout, num_tokens: int, num_seqs: int) -> None:
        """Copy a layout to the device, followed by inert tokens and sequences up to these sizes."""
        self._turn = (self._turn + 1) % len(self._stages)
        stage, read = self._stages[self._turn], self._read[self._turn]
        if read is not None:
            read.synchronize()
        views = {name: view.numpy() for name, view in stage.views.items()}
        _fill(views["ids"], layout.ids, 0, num_tokens)
        _fill(views["sources"], layout.sources, -1, num_tokens)
        _fill(views["positions"], layout.positions, 0, num_tokens)
        _fill(views["slots"], layout.slots, -1, num_tokens)
        _fill(views["logit_rows"], layout.logit_rows, 0, len(layout.logit_rows))
        _fill(views["seq_lens"], layout.seq_lens, 0, num_seqs)
        _fill_bounds(views["cu_seqlens"], layout, num_tokens, num_seqs)
        long = layout.cu_seqlens[layout.num_short :]
        _fill(views["cu_long"], long - long[0], 0, len(long))
        _fill(views["long_lens"], layout.seq_lens[layout.num_short :], 0, 0)
        for row, pages in zip(stage.pages.numpy(), layout.pages, strict=False):
            row[: len(pages)] = pages
        self._device.memory.copy_(stage.memory, non_blocking=True)
        used = layout.num_seqs
        self._device.pages[:used].copy_(stage.pages[:used], non_blocking=True)
        if self._device.memory.is_cuda:
            read = self._read[self._turn] = torch.cuda.Event()
            read.record()

    def ids(self, num_tokens: int, unseen: torch.Tensor) -> torch.Tensor:
        """Token ids, with those the host has not seen from the device's table."""
        ids, sources = (self._device.views[name][:num_tokens] for name in ("ids", "sources"))
        return torch.where(sources < 0, ids, unseen.flatten()[sources.clamp(min=0)])

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Of every token in its sequence."""
        return self._device.views["positions"][:num_tokens]

    def logit_rows(self, count: int) -> torch.Tensor:
        """Tokens whose logits are wanted."""
        return self._device.views["logit_rows"][:count]

    def step(self, num_tokens: int, num_seqs: int, short: tuple[int, int] | None = None) -> Step:
        """What attention reads; `short` are tokens and sequences to be attended to apart."""
        views = self._device.views
        bounds, starts = [0, num_tokens], [0, num_seqs]
        if short is not None:
            bounds.insert(1, short[0])
            starts.insert(1, short[1])
        groups = [
            Group(
                slice(bounds[i], bounds[i + 1]),
                views["cu_long" if i else "cu_seqlens"][: starts[i + 1] - starts[i] + 1],
                views["long_lens" if i else "seq_lens"][: starts[i + 1] - starts[i]],
                self._device.pages[starts[i] : starts[i + 1], : self._num_pages],
            )
            for i in range(len(bounds) - 1)
        ]
        return Step(groups, views["slots"][:num_tokens])


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One piece of memory under several names, and a page table."""

    memory: torch.Tensor  # uint8
    views: Views
    pages: torch.Tensor  # int32 [max_num_seqs, max_num_pages]

    @staticmethod
    def make(
        sizes: dict[str, int], pages: tuple[int, int], device: torch.device, *, pinned: bool
    ) -> _Buffers:
        dtypes = {name: torch.int32 if name in INT32 else torch.int64 for name in sizes}
        starts: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size * dtypes[name].itemsize // 16) * 16
        memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        views = {
            name: memory[starts[name] : starts[name] + size * dtypes[name].itemsize].view(
                dtypes[name]
            )
            for name, size in sizes.items()
        }
        table = torch.zeros(pages, dtype=torch.int32, device=device, pin_memory=pinned)
        return _Buffers(memory, views, table)


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
