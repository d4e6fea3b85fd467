"""The model's inputs in persistent device memory, filled anew for each step.

The arrays have fixed addresses: a captured graph reads them where they are. The host fills them by
one copy without waiting. It writes into one of several pinned copies in turn, because those of
steps in flight may not have been read yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.compositions.tree import DraftTree, make_draft_tree
from anabranch.llm.runner.step import Entry, Step
from anabranch.llm.runner.step_layout import WHOLE, DecodeWay, StepLayout

NUM_COPIES = 8  # a draft model may run several times in a step
ALIGNMENT = 16  # bytes: kernels are compiled for pointers like that
Field = tuple[torch.dtype, tuple[int, ...]]
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
INT32 = ("parents", "cu_seqlens", "cu_long", "seq_lens", "long_lens")
ALIGNED = 4  # every row of the page table begins at 16 bytes: kernels are compiled for that


class FixedArrays:
    """Named arrays in one piece of memory, in the order given."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._copies = [
            _Piece.make(fields, torch.device("cpu"), pinned=on_gpu)
            for _ in range(NUM_COPIES if on_gpu else 1)
        ]
        self._arrays = [
            {name: view.numpy() for name, view in copy.views.items()} for copy in self._copies
        ]
        self._read: list[torch.cuda.Event | None] = [None] * len(self._copies)
        self._turn = 0
        self._device = _Piece.make(fields, device, pinned=False)
        last = self._device.views[list(fields)[-1]]
        self._row_bytes = last[0].nbytes
        self._last_start = self._device.memory.shape[0] - last.shape[0] * self._row_bytes

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self._device.views

    def write(self) -> Arrays:
        """The copy to be filled next, with what an earlier step left in it."""
        self._turn = (self._turn + 1) % len(self._copies)
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        return self._arrays[self._turn]

    def send(self, num_rows: int) -> None:
        """Copy what was written to the device; of the last array only so many rows."""
        end = self._last_start + num_rows * self._row_bytes
        memory = self._device.memory
        memory[:end].copy_(self._copies[self._turn].memory[:end], non_blocking=True)
        if memory.is_cuda:
            read = self._read[self._turn] = self._read[self._turn] or torch.cuda.Event()
            read.record()


@dataclass(frozen=True, slots=True)
class _Piece:
    """One piece of memory under several names."""

    memory: torch.Tensor  # uint8
    views: dict[str, torch.Tensor]

    @staticmethod
    def make(fields: Mapping[str, Field], device: torch.device, *, pinned: bool) -> _Piece:
        starts: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in fields.items():
            starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = starts[name] + int(np.prod(shape)) * dtype.itemsize
        memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        views = {
            name: memory[starts[name] : starts[name] + int(np.prod(shape)) * dtype.itemsize]
            .view(dtype)
            .view(shape)
            for name, (dtype, shape) in fields.items()
        }
        return _Piece(memory, views)


def aligned(size: int) -> int:
    """The next size whose rows of int32 all begin at 16 bytes."""
    return -(-size // ALIGNED) * ALIGNED


class StepInputs:
    """Buffers for steps of up to some number of tokens and sequences."""

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_num_pages: int,
        device: torch.device,
        trees: bool = False,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.max_num_seqs = max_num_seqs
        self._num_pages = max_num_pages
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
            **({"parents": max_num_tokens} if trees else {}),
        }
        fields = {
            name: (torch.int32 if name in INT32 else torch.int64, (size,))
            for name, size in sizes.items()
        }
        pages = {"pages": (torch.int32, (max_num_seqs, aligned(max_num_pages)))}
        self._arrays = FixedArrays(fields | pages, device)

    def load(self, layout: StepLayout, num_tokens: int, num_seqs: int) -> None:
        """Copy a layout to the device, followed by inert tokens and sequences up to these sizes."""
        arrays = self._arrays.write()
        _fill(arrays["ids"], layout.ids, 0, num_tokens)
        _fill(arrays["sources"], layout.sources, -1, num_tokens)
        _fill(arrays["positions"], layout.positions, 0, num_tokens)
        _fill(arrays["slots"], layout.slots, -1, num_tokens)
        _fill(
            arrays["logit_rows"], layout.logit_rows, 0, 1
        )  # a graph always reads at least one row
        _fill(arrays["seq_lens"], layout.seq_lens, 0, num_seqs)
        _fill_bounds(arrays["cu_seqlens"], layout, num_tokens, num_seqs)
        if layout.parents is not None:
            _fill(arrays["parents"], layout.parents, -1, num_tokens)
        long = layout.cu_seqlens[layout.num_short :]
        _fill(arrays["cu_long"], long - long[0], 0, len(long))
        _fill(arrays["long_lens"], layout.seq_lens[layout.num_short :], 0, 0)
        fill_pages(arrays["pages"], layout.pages)
        self._arrays.send(layout.num_seqs)

    def ids(self, num_tokens: int, unseen: torch.Tensor) -> torch.Tensor:
        """Token ids, with those the host has not seen from the device's table."""
        ids, sources = (self._arrays.tensors[name][:num_tokens] for name in ("ids", "sources"))
        return torch.where(sources < 0, ids, unseen.flatten()[sources.clamp(min=0)])

    def positions(self, num_tokens: int, tree: DraftTree | None = None) -> torch.Tensor:
        """Of every token in its sequence; those of trees, which come first, by their depth."""
        positions = self._arrays.tensors["positions"][:num_tokens]
        if tree is None:
            return positions
        of_trees = tree.positions.clamp(min=0).long()  # inert sequences have no context
        return torch.cat([of_trees, positions[len(of_trees) :]])

    def tree(self, num_tokens: int, num_seqs: int) -> DraftTree:
        """Masks and positions of the first tokens and sequences, made from their parents."""
        at = self._arrays.tensors
        starts, lengths = at["cu_seqlens"][: num_seqs + 1], at["seq_lens"][:num_seqs]
        parents = at["parents"][:num_tokens]
        return make_draft_tree(parents, cu_seqlens_q=starts, seq_lens=lengths)

    def logit_rows(self, count: int) -> torch.Tensor:
        """Tokens whose logits are wanted."""
        return self._arrays.tensors["logit_rows"][:count]

    def step(
        self,
        num_tokens: int,
        num_seqs: int,
        short: tuple[int, int] | None = None,
        *,
        is_fresh: bool = False,
        way: DecodeWay = WHOLE,
        tree: DraftTree | None = None,
    ) -> Step:
        """What attention reads; `short` tokens and sequences in front get an entry of their own.

        With `is_fresh`, all keys of the last entry's sequences are new. The first entry attends
        in a `way` of its own, under the mask of a tree if there is one.
        """
        views = self._arrays.tensors
        bounds, starts = [0, num_tokens], [0, num_seqs]
        if short is not None:
            bounds.insert(1, short[0])
            starts.insert(1, short[1])
        entries = [
            Entry(
                slice(bounds[i], bounds[i + 1]),
                views["cu_long" if i else "cu_seqlens"][: starts[i + 1] - starts[i] + 1],
                views["long_lens" if i else "seq_lens"][: starts[i + 1] - starts[i]],
                views["pages"][starts[i] : starts[i + 1], : self._num_pages],
                is_fresh and i == len(bounds) - 2,
                way=WHOLE if i or (is_fresh and len(bounds) == 2) else way,
                tree_mask=None if i or tree is None else tree.tree_mask,
            )
            for i in range(len(bounds) - 1)
        ]
        return Step(entries, views["slots"][:num_tokens])


def fill_pages(target: NDArray[np.integer], pages: Sequence[array[int]]) -> None:
    """Write the pages of some sequences, each at the beginning of a row."""
    lengths = np.array([len(each) for each in pages], np.int64)
    longest = int(lengths.max(initial=0))
    rows = target[: len(pages), :longest]
    rows[np.arange(longest) < lengths[:, None]] = np.frombuffer(b"".join(pages), np.int32)


def _fill(target: NDArray[np.integer], values: NDArray[np.int64], rest: int, size: int) -> None:
    target[: len(values)] = values
    target[len(values) : size] = rest


def _fill_bounds(
    target: NDArray[np.integer], layout: StepLayout, num_tokens: int, num_seqs: int
) -> None:
    target[: layout.num_seqs + 1] = layout.cu_seqlens
    missing = num_seqs - layout.num_seqs
    if missing:  # inert sequences share the inert tokens evenly
        steps = np.arange(1, missing + 1)
        spare = num_tokens - layout.num_tokens
        target[layout.num_seqs + 1 : num_seqs + 1] = layout.num_tokens + steps * spare // missing
