"""Where the rows of a converted weight lie in its GGUF file, so that they can be kept as they are.

A conversion renames tensors and moves rows. Instead of repeating its rules, a weight is looked for
by its values: a tensor of the same shape that has them, in the file's order or in that of rotated
halves. What is not found, having been computed from several tensors, stays floats.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from anabranch.kernels.cpu.linear import F32, WeightPart, pack
from anabranch.kernels.cpu.tiles import TILES, pack_tiles
from anabranch.llm.models.gguf_llama import halves_from_pairs
from anabranch.llm.models.gguf_metadata import GGUFModel, tensor_values

HEADS = ("attention.head_count", "attention.head_count_kv")
Key = tuple[tuple[int, ...], bytes]


class GGUFRows:
    """The matrices of a file, found by their values."""

    def __init__(self, model: GGUFModel) -> None:
        counts = [model.shape(name, 1) for name in HEADS]  # lists where layers differ
        self._heads = sorted({count for count in counts if isinstance(count, int)})
        self._tensors: dict[Key, list[gguf.ReaderTensor]] = {}
        for tensor in model.tensors.values():
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if len(shape) == 2 and all(shape):
                self._tensors.setdefault((shape, _first_row(tensor)), []).append(tensor)

    def find(self, weight: torch.Tensor) -> WeightPart | None:
        """A weight [n, k] packed for kernels in the format of its file."""
        if weight.ndim != 2 or not weight.numel():
            return None
        key = (tuple(weight.shape), _key(weight[0]))
        for tensor in self._tensors.get(key, []):
            order = self._order(tensor, weight)
            if order is not None:
                return _pack(tensor, order, weight)
        return None

    def _order(self, tensor: gguf.ReaderTensor, weight: torch.Tensor) -> torch.Tensor | None:
        values = tensor_values(tensor).to(weight.dtype)
        for order in self._orders(len(weight)):
            if torch.equal(values[order], weight):
                return order
        return None

    def _orders(self, n: int) -> Iterator[torch.Tensor]:
        rows = torch.arange(n)
        yield rows
        for heads in self._heads:
            if n % (2 * heads) == 0:
                yield halves_from_pairs(rows[:, None], heads)[:, 0]


def _first_row(tensor: gguf.ReaderTensor) -> bytes:
    row: Any = tensor.data[:1]
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return _key(torch.from_numpy(np.array(row)).view(torch.bfloat16).flatten())
    return _key(torch.from_numpy(np.array(dequantize(row, tensor.tensor_type))).flatten())


def _key(row: torch.Tensor) -> bytes:
    """In 16 bits, which some conversions round to."""
    return row.detach().half().numpy().tobytes()


def _pack(tensor: gguf.ReaderTensor, order: torch.Tensor, weight: torch.Tensor) -> WeightPart:
    name, (n, k) = tensor.tensor_type.name, weight.shape
    kind = TILES.get(name)
    if kind is None or k % kind.span:
        return WeightPart(F32, n, pack(weight.float()))
    raw = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(n, -1)
    return WeightPart(name, n, torch.from_numpy(pack_tiles(raw[order.numpy()], kind, k)))
