"""Linear layers over quantised weights: choice of a product, and the torch operator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from anabranch.device import capability, has_overlap, num_sms, shared_memory
from anabranch.kernels.layers.hopper_code_config import (
    CodeTiles,
    code_tile_constants,
    select_code_tiles,
)
from anabranch.kernels.layers.quantised_config import (
    CodeConstants,
    RowsConfig,
    fit_quantised,
    select_quantised,
    select_rows,
)
from anabranch.llm.models.quantised_inputs import e4m3_product, takes_e4m3
from anabranch.llm.models.quantised_weight import QuantisedWeight

if TYPE_CHECKING:
    from anabranch.kernels.layers.quantised_product import CodeArguments


class QuantisedLinear(nn.Linear):
    """nn.Linear over a quantised weight, which is nowhere else.

    Up to 256 rows are multiplied by codes that are widened in registers; on Hopper more are, by
    large weights of int4. Otherwise the weight is expanded into memory of the call, unless the
    checkpoint's inputs are e4m3: those of more than 32 rows are quantised, where the GPU
    multiplies such numbers.
    """

    quantised: QuantisedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return self._product(input, gated=False)

    def gated(self, input: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where the outputs are gate before up."""
        return self._product(input, gated=True)

    def _product(self, input: torch.Tensor, *, gated: bool) -> torch.Tensor:
        held = self.quantised
        x = input if held.order is None else input[..., held.order]
        constants = held.constants
        given = x, held.words, held.scales, held.zeros, held.counters, self.bias
        settings = constants.kind, constants.group_n, constants.group_k, held.fp8_inputs, gated
        if torch.compiler.is_compiling():
            return torch.ops.anabranch.quantised_linear(*given, *settings)
        return _linear(*given, *settings)

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A new tensor [out_features, in_features]."""
        return self.quantised.expanded()


def set_quantised(linear: nn.Linear, weight: QuantisedWeight) -> None:
    """Let a linear layer read a quantised weight instead of its own."""
    del linear.weight
    linear.__class__ = QuantisedLinear
    linear.add_module("quantised", weight)


def _linear(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    group_n: int,
    group_k: int,
    fp8_inputs: bool,
    gated: bool,
) -> torch.Tensor:
    from anabranch.kernels.layers.quantised_product import CodeArguments

    rows, n = x.reshape(-1, x.shape[-1]).contiguous(), len(words)
    constants = CodeConstants(kind, group_n, group_k, packed=capability(x.device) >= (8, 0))
    weight = CodeArguments(words, scales, zeros)
    few = _few_rows(rows, constants, n)
    if not rows.numel():
        y = x.new_empty(len(rows), n // 2 if gated else n)
    elif few is not None and (not gated or n % 16 == 0):
        y = _by_rows(rows, weight, bias, constants, few, gated)
    else:
        if fp8_inputs and takes_e4m3(rows, n, constants):
            y = e4m3_product(rows, words, scales, counters, bias, constants)
        elif (tiles := _hopper_tiles(rows, weight, constants)) is not None:
            y = _by_tiles(rows, weight, counters, bias, constants, tiles)
        else:
            y = _by_codes(rows, weight, counters, bias, constants)
        y = _gate(y) if gated else y
    return y.view(*x.shape[:-1], y.shape[-1])


def _few_rows(x: torch.Tensor, constants: CodeConstants, n: int) -> RowsConfig | None:
    """Tiles of the kernel for few rows, which reads 16 bytes of a row at a time."""
    if x.element_size() != 2 or x.shape[1] % 8 or x.data_ptr() % 16:
        return None
    return select_rows(constants, len(x), n, num_sms(x.device))


def _by_rows(
    x: torch.Tensor,
    weight: CodeArguments,
    bias: torch.Tensor | None,
    constants: CodeConstants,
    config: RowsConfig,
    gated: bool,
) -> torch.Tensor:
    from anabranch.kernels.layers.quantised_rows import quantised_rows

    y = x.new_empty(len(x), len(weight.words) // (2 if gated else 1))
    config = replace(config, overlap=has_overlap(x.device))
    quantised_rows(x, weight, bias, y, constants, config, gated=gated)
    return y


def _hopper_tiles(
    x: torch.Tensor, weight: CodeArguments, constants: CodeConstants
) -> CodeTiles | None:
    """Tiles of the Hopper kernel, which copies boxes of rows and writes 8 outputs at a time."""
    (m, k), n = x.shape, len(weight.words)
    if capability(x.device)[0] != 9 or x.element_size() != 2:
        return None
    if n % 8 or k % 8 or x.data_ptr() % 16:
        return None
    zeros = weight.zeros is not None
    return select_code_tiles(constants, m, n, k, num_sms(x.device), zeros=zeros)


def _by_tiles(
    x: torch.Tensor,
    weight: CodeArguments,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    constants: CodeConstants,
    tiles: CodeTiles,
) -> torch.Tensor:
    from anabranch.kernels.layers.hopper_codes import hopper_codes

    (m, k), n = x.shape, len(weight.words)
    grouped = constants.group_k < k
    split_scales = grouped and weight.scales.dtype != x.dtype
    c = code_tile_constants(tiles, constants, grouped=grouped, split_scales=split_scales)
    num_programs = c.num_programs(m, n, k, num_sms(x.device))
    sums = torch.empty(2 * num_programs, c.size, dtype=torch.float32, device=x.device)
    y = x.new_empty(m, n)
    hopper_codes(x, weight, bias, y, sums, counters, c, num_programs)
    return y


def _by_codes(
    x: torch.Tensor,
    weight: CodeArguments,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    constants: CodeConstants,
) -> torch.Tensor:
    """By codes that are widened in registers, or by a weight that is expanded into memory."""
    from anabranch.kernels.layers.expand_codes import expand_codes
    from anabranch.kernels.layers.quantised_product import quantised_product

    (m, k), n, device = x.shape, len(weight.words), x.device
    config = None
    if constants.has_product and x.element_size() == 2:
        config = select_quantised(constants, m, n, k, num_sms(device))
    if config is None:
        w = x.new_empty(n, k)
        expand_codes(weight, w, constants)
        return functional.linear(x, w, bias)
    shared_bytes, hopper = shared_memory(device)[0], has_overlap(device)
    config = fit_quantised(config, constants, shared_bytes=shared_bytes, hopper=hopper)
    y, sums = x.new_empty(m, n), None
    if config.splits > 1:
        sums = torch.empty(config.splits, m, n, dtype=torch.float32, device=device)
    quantised_product(x, weight, bias, y, sums, counters, constants, config)
    return y


def _gate(joined: torch.Tensor) -> torch.Tensor:
    from anabranch.kernels.layers.gate_outputs import gate_outputs

    y = joined.new_empty(len(joined), joined.shape[1] // 2)
    gate_outputs(joined, y)
    return y


@torch.library.custom_op("anabranch::quantised_linear", mutates_args=())  # counters end as 0
def _quantised_linear_op(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    group_n: int,
    group_k: int,
    fp8_inputs: bool,
    gated: bool,
) -> torch.Tensor:
    given = x, words, scales, zeros, counters, bias
    return _linear(*given, kind, group_n, group_k, fp8_inputs, gated)


@_quantised_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, words: torch.Tensor, *settings: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0] // (2 if settings[-1] else 1))
