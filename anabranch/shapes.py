"""Shapes checked by name: equal letters mean equal sizes, and an error names both sides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Sizes:
    """Binds names to sizes as tensors are matched, and remembers where each size came from."""

    def __init__(self) -> None:
        self._bound: dict[str, tuple[int, str]] = {}

    def __getitem__(self, name: str) -> int:
        return self._bound[name][0]

    def bind(self, name: str, size: int, origin: str) -> None:
        """Fix a size, or complain that it was fixed to another one before."""
        known = self._bound.setdefault(name, (size, origin))
        if known[0] != size:
            raise ValueError(
                f"{origin} has {name} = {size}, but {known[1]} has {name} = {known[0]}"
            )

    def match(self, argument: str, tensor: torch.Tensor, pattern: str) -> None:
        """Match a tensor with a pattern such as "tokens heads dim"; a number is a literal size."""
        names = pattern.split()
        shape = tuple(tensor.shape)
        if len(shape) != len(names):
            raise ValueError(f"{argument} must be [{', '.join(names)}], got shape {shape}")
        for name, size in zip(names, shape, strict=True):
            if name.isdigit():
                if int(name) != size:
                    raise ValueError(f"{argument} must be [{', '.join(names)}], got shape {shape}")
            else:
                self.bind(name, size, argument)


def check_dtype(argument: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a tensor whose dtype is not one of those allowed."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"{argument} must be one of {names}, got {tensor.dtype}")


def check_device(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that lies on another device."""
    if tensor.device != device:
        raise ValueError(f"{argument} is on {tensor.device}, expected {device}")


def read_index(index: torch.Tensor) -> list[int]:
    """The values of an index of one dimension. Synchronises."""
    return cast("list[int]", index.tolist())  # pyright: ignore[reportUnknownMemberType]


def check_ascending(argument: str, bounds: Sequence[int]) -> None:
    """Refuse bounds of sequences of which one ends before it begins."""
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise ValueError(
                f"{argument} must not descend, got {start} then {stop} at sequence {seq}"
            )
