"""Arrays at fixed addresses in device memory, which the host fills by one copy without waiting.

A captured graph reads them where they are. The host writes into one of several pinned copies in
turn, because those of steps in flight may not have been read yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

NUM_COPIES = 8  # a draft model may run several times in a step
ALIGNMENT = 16  # bytes: kernels are compiled for pointers like that
Field = tuple[torch.dtype, tuple[int, ...]]
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


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
