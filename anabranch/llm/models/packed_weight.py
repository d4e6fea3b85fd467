"""A weight in the order of CPU kernels: parts of a format each, with outputs side by side."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from anabranch.kernels.cpu.linear import F32, FLOAT_INPUTS, WeightPart, describe, pack, packed_rows


class PackedWeight(nn.Module):
    """A weight [n, k] that is nowhere else.

    Products with codes quantise their inputs to 8 bits in blocks of 32, unless `float_inputs`.
    """

    def __init__(self, parts: Sequence[WeightPart], k: int, *, float_inputs: bool = False) -> None:
        super().__init__()
        self.formats = [(part.format, part.n) for part in parts]
        self.n, self.k = sum(part.n for part in parts), k
        self.float_inputs = float_inputs
        self.data = nn.ParameterList(nn.Parameter(each.data, False) for each in parts)
        self._table: torch.Tensor | None = None

    @classmethod
    def of_floats(cls, weight: torch.Tensor) -> PackedWeight:
        """A float32 weight [n, k]."""
        return cls([WeightPart(F32, len(weight), pack(weight))], weight.shape[1])

    @property
    def table(self) -> torch.Tensor:
        """What kernels read: int64, with the addresses of the parts."""
        if self._table is None:
            self._table = describe(self.parts, self.k, float_inputs=self.float_inputs)
        return self._table

    @property
    def parts(self) -> list[WeightPart]:
        """The parts, which share this weight's memory."""
        return [
            WeightPart(kind, n, data.detach())
            for (kind, n), data in zip(self.formats, self.data, strict=True)
        ]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows, float32 [*ids.shape, k]."""
        return packed_rows(self.table, self.k, ids)

    def expanded(self) -> torch.Tensor:
        """A new tensor, float32 [n, k]."""
        return self.rows(torch.arange(self.n))

    def __getstate__(self) -> dict[str, Any]:
        """Copies lie elsewhere and have tables of their own."""
        return {**self.__dict__, "_table": None}


def join_weights(weights: Sequence[PackedWeight]) -> PackedWeight:
    """The outputs of several weights of one input, after each other; no part is copied."""
    parts = [part for weight in weights for part in weight.parts]
    return PackedWeight(parts, weights[0].k, float_inputs=weights[0].float_inputs)


@contextmanager
def exact_products(model: nn.Module) -> Generator[None]:
    """Keep the inputs of a model's products floats, so that results can be compared."""
    weights = [module for module in model.modules() if isinstance(module, PackedWeight)]
    for weight in weights:
        weight.table[FLOAT_INPUTS] = 1
    try:
        yield
    finally:
        for weight in weights:
            weight.table[FLOAT_INPUTS] = int(weight.float_inputs)
