"""The memory of a plan: pieces of one allocation, so that a plan is one tensor."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

ALIGNMENT = 128  # bytes, a line of the cache


class Piece(NamedTuple):
    """Where a tensor lies in a room."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The first byte after it."""
        return self.offset + self.dtype.itemsize * prod(self.shape)

    def open(self, room: torch.Tensor) -> torch.Tensor:
        """The tensor, which shares the memory of the room."""
        return room[self.offset : self.stop].view(self.dtype).view(self.shape)


def arrange(*tensors: tuple[torch.dtype, tuple[int, ...]]) -> tuple[Piece, ...]:
    """Pieces one after another; the room they need ends where the last one stops."""
    pieces: list[Piece] = []
    offset = 0
    for dtype, shape in tensors:
        pieces.append(Piece(offset, dtype, shape))
        offset = -(-pieces[-1].stop // ALIGNMENT) * ALIGNMENT
    return tuple(pieces)
