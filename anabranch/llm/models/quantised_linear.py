"""Linear layers over quantised weights: choice of a product, and the torch operator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from anabranch.device import capability, has_overlap, num_sms, shared_memory
from anabranch.kernels.layers.quantised_config import (
    FEW_ROWS,
    RUN,
    CodeConstants,
    fit_quantised,
    select_quantised,
)
from anabranch.llm.models.quantised_weight import QuantisedWeight


class QuantisedLinear(nn.Linear):
    """nn.Linear over a quantised weight, which is nowhere else.

    Up to 256 rows are multiplied by codes that are widened in registers. For more the weight is
    expanded into memory of the call, unless the checkpoint's inputs are e4m3: those are quantised
    with a scale a row from 17 rows on, where the GPU multiplies such numbers.
    """

    quantised: QuantisedWeight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        held = self.quantised
        x = input if held.order is None else input[..., held.order]
        constants = held.constants
        given = x, held.words, held.scales, held.zeros, held.counters, self.bias
        settings = constants.kind, constants.group_n, constants.group_k, held.fp8_inputs
        if torch.compiler.is_compiling():
            return torch.ops.anabranch.quantised_linear(*given, *settings)
        return _linear(*given, *settings)

    def gated(self, input: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where the outputs are gate before up."""
        gate, up = self(input).chunk(2, -1)
        return functional.silu(gate) * up

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
) -> torch.Tensor:
    from anabranch.kernels.layers.expand_codes import expand_codes
    from anabranch.kernels.layers.quantised_product import CodeArguments, quantised_product

    rows, n = x.reshape(-1, x.shape[-1]), len(words)
    (m, k), device = rows.shape, x.device
    y = x.new_empty(m, n)
    packed = capability(device) >= (8, 0)
    constants = CodeConstants(kind, group_n, group_k, packed=packed)
    weight = CodeArguments(words, scales, zeros)
    if not m:
        return y.view(*x.shape[:-1], n)
    if fp8_inputs and m > FEW_ROWS and _has_scaled(x, n):
        y = _scaled(rows, words, scales, bias)
        return y.view(*x.shape[:-1], n)
    config = None
    if constants.has_product and x.element_size() == 2:
        config = select_quantised(m, n, -(-k // constants.run), num_sms(device))
    if config is None:
        w = x.new_empty(n, k)
        expand_codes(weight, w, constants)
        y = functional.linear(rows, w, bias)
    else:
        given = shared_memory(device)[0], has_overlap(device)
        config = fit_quantised(config, constants, shared_bytes=given[0], hopper=given[1])
        sums = None
        if config.splits > 1:
            sums = torch.empty(config.splits, m, n, dtype=torch.float32, device=device)
        rows = rows.contiguous()
        quantised_product(rows, weight, bias, y, sums, counters, constants, config)
    return y.view(*x.shape[:-1], n)


def _has_scaled(x: torch.Tensor, n: int) -> bool:
    """Whether torch multiplies e4m3 by e4m3 with a scale for each row and output."""
    return capability(x.device)[0] == 9 and x.dtype == torch.bfloat16 and n % 16 == 0


def _scaled(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """By torch, over inputs quantised with a scale for each row."""
    from anabranch.kernels.layers.quantise_rows import quantise_rows

    m, k = x.shape
    codes = torch.empty(m, -(-k // RUN) * RUN // 2, dtype=torch.int16, device=x.device)
    row_scales = torch.empty(m, dtype=torch.float32, device=x.device)
    quantise_rows(x.contiguous(), codes, row_scales)
    given = codes.view(torch.float8_e4m3fn), words.view(torch.float8_e4m3fn).T
    multiply = cast("Any", torch)._scaled_mm
    y = multiply(*given, scale_a=row_scales[:, None], scale_b=scales, out_dtype=x.dtype)
    return y if bias is None else y + bias


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
) -> torch.Tensor:
    return _linear(x, words, scales, zeros, counters, bias, kind, group_n, group_k, fp8_inputs)


@_quantised_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, words: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0])
