"""A weight of 8-bit or 4-bit codes with scales, in the order of columns that GPU kernels read.

`number = (code - zero) * scale`, for groups of outputs and columns that share scale and zero.
Columns are cut into runs; a word of 16 bits holds codes that are a part of a run apart, so that a
tile of words becomes as many tiles of numbers without moving any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from anabranch.kernels.layers.quantised_config import NUM_COUNTERS, RUN, CodeConstants

FP8, INT8, INT4 = "fp8", "int8", "int4"


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight as a checkpoint gives it: one code a byte, e4m3, int8, or int4 from 0 to 15."""

    kind: str
    codes: torch.Tensor  # uint8 [n, k]
    scales: torch.Tensor  # [row groups, column groups]
    zeros: torch.Tensor | None = None  # the same shape; without, 8 for int4 and 0 for others
    order: torch.Tensor | None = None  # int64 [k]: the input of each column, where that is another
    group_n: int = 1  # outputs and columns of a group
    group_k: int | None = None  # all columns


class QuantisedWeight(nn.Module):
    """A weight [n, k] for inputs of a dtype. With `fp8_inputs`, those of many rows may be e4m3."""

    counters: torch.Tensor  # int32, 0 between products

    def __init__(
        self, given: Codes, *, dtype: torch.dtype = torch.bfloat16, fp8_inputs: bool = False
    ) -> None:
        super().__init__()
        (self.n, self.k), self.dtype = given.codes.shape, dtype
        whole = given.group_k is None or given.group_k >= self.k
        group_k = -(-self.k // RUN) * RUN if whole else cast("int", given.group_k)
        self.constants = CodeConstants(given.kind, given.group_n, group_k, packed=False)
        by_row = whole and given.group_n == 1
        by_block = given.group_n == group_k == RUN and self.k % (4 * RUN) == 0  # torch's product
        self.fp8_inputs = fp8_inputs and given.kind == FP8 and (by_row or by_block)
        groups = -(-self.n // given.group_n), -(-self.k // group_k)
        for name, values in (("scales", given.scales), ("zeros", given.zeros)):
            if values is not None and values.shape != groups:
                raise ValueError(
                    f"{name} must be {list(groups)} for a weight [{self.n}, {self.k}] in groups of "
                    f"{given.group_n} x {given.group_k or self.k}, got {list(values.shape)}"
                )
        self.words = _fixed(pack_codes(given.codes, self.constants))
        scales, zeros = given.scales, given.zeros
        if scales.itemsize != 2 or groups[1] == 1:  # those of groups stay as short as they are
            scales = scales.float()
        self.scales = _fixed(scales.T.contiguous())
        if zeros is not None and zeros.is_floating_point():
            if not self.constants.short:
                raise ValueError(f"zeros of groups of {group_k} columns must be integers")
            zeros = _fixed(zeros.to(torch.float16).T.contiguous())
        elif zeros is not None:  # all are within int8
            zeros = _fixed(zeros.to(torch.int8).T.contiguous())
        self.zeros = zeros
        self.order = None if given.order is None else _fixed(given.order)
        counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=self.words.device)
        self.register_buffer("counters", counters, persistent=False)

    def expanded(self) -> torch.Tensor:
        """A new tensor [n, k], by torch, with columns in the order of inputs."""
        codes = unpack_codes(self.words, self.constants)[:, : self.k]
        if self.constants.kind == FP8:
            numbers = codes.view(torch.float8_e4m3fn).float()
        else:
            signed = codes.view(torch.int8) if self.constants.kind == INT8 else codes
            zeros = self.zeros
            numbers = signed.float()
            numbers -= self.constants.zero if zeros is None else self._spread(zeros)
        numbers *= self._spread(self.scales)
        if self.order is not None:
            numbers = numbers[:, torch.argsort(self.order)]
        return numbers.to(self.dtype)

    def _spread(self, groups: torch.Tensor) -> torch.Tensor:
        """Values of groups for every output and column."""
        if groups.shape[0] > 1:
            groups = groups.repeat_interleave(self.constants.group_k, 0)[: self.k]
        return groups.repeat_interleave(self.constants.group_n, 1)[:, : self.n].T

    @property
    def joins(self) -> tuple[object, ...]:
        """What weights have in common whose outputs can be put after each other."""
        order = None if self.order is None else self.order.cpu().numpy().tobytes()
        alone = self if self.n % self.constants.group_n else None  # it ends within a group
        kinds = self.scales.dtype, None if self.zeros is None else self.zeros.dtype
        held = self.k, self.dtype, self.constants, *kinds
        return *held, order, self.fp8_inputs, alone


def join_quantised(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """The outputs of several weights of one input and format, after each other."""
    first = weights[0]
    joined = QuantisedWeight.__new__(QuantisedWeight)
    nn.Module.__init__(joined)
    joined.n, joined.k = sum(weight.n for weight in weights), first.k
    joined.dtype = first.dtype
    joined.constants, joined.fp8_inputs, joined.order = (
        first.constants,
        first.fp8_inputs,
        first.order,
    )
    joined.words = _fixed(torch.cat([weight.words for weight in weights]))
    joined.scales = _fixed(torch.cat([weight.scales for weight in weights], 1))
    joined.zeros = None
    if first.zeros is not None:
        zeros = [cast("torch.Tensor", weight.zeros) for weight in weights]
        joined.zeros = _fixed(torch.cat(zeros, 1))
    joined.register_buffer("counters", first.counters, persistent=False)
    return joined


def pack_codes(codes: torch.Tensor, constants: CodeConstants) -> torch.Tensor:
    """int16 [n, words] from a code a byte [n, k]; columns are padded to whole runs."""
    n, k = codes.shape
    padded = nn.functional.pad(codes, (0, -k % constants.run))
    parts = padded.view(n, -1, constants.parts, constants.words).to(torch.int32)
    bits = 16 // constants.parts
    words = parts[:, :, 0].clone()
    for part in range(1, constants.parts):
        words |= parts[:, :, part] << bits * part
    return words.view(n, -1).to(torch.int16)


def unpack_codes(words: torch.Tensor, constants: CodeConstants) -> torch.Tensor:
    """A code a byte, uint8 [n, runs * run]."""
    n, bits = len(words), 16 // constants.parts
    wide = words.to(torch.int32).view(n, -1, 1, constants.words)
    shifts = torch.arange(constants.parts, device=words.device) * bits
    parts = (wide >> shifts[:, None].to(torch.int32)) & ((1 << bits) - 1)
    return parts.to(torch.uint8).view(n, -1)


def _fixed(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
