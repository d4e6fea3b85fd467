"""Products of inputs that are quantised to e4m3 with weights of e4m3 codes.

An input has a scale a row, or one for each 128 columns of a row where the weight has blocks.
Sums are accumulated as the matrix unit does by itself, in fewer bits than float32's.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional

from anabranch.device import capability, has_overlap, num_sms
from anabranch.kernels.layers.quantised_config import (
    RUN,
    SCALED_ROWS,
    CodeConstants,
    select_scaled,
)

FEWEST_ROWS = 33  # for fewer, products over codes are as fast and round no inputs
FEWEST_IN_BLOCKS = 65


def takes_e4m3(x: torch.Tensor, n: int, constants: CodeConstants) -> bool:
    """Whether there is a product for so many rows on the device."""
    fewest = FEWEST_ROWS if constants.group_n == 1 else FEWEST_IN_BLOCKS
    fits = capability(x.device)[0] == 9 and x.dtype == torch.bfloat16 and n % 16 == 0
    return fits and len(x) >= fewest


def e4m3_product(
    x: torch.Tensor,  # [m, k], contiguous
    words: torch.Tensor,
    scales: torch.Tensor,
    counters: torch.Tensor,
    bias: torch.Tensor | None,
    constants: CodeConstants,
) -> torch.Tensor:
    """x @ weight.T + bias, over rounded inputs."""
    from anabranch.kernels.layers.scaled_product import scaled_product

    (m, k), n = x.shape, len(words)
    width = -(-k // RUN) * RUN
    w = words.view(torch.float8_e4m3fn)
    if constants.group_n > 1:
        y = _by_blocks(x, width, w, scales)
        return y if bias is None else y + bias
    codes, x_scales = _quantise(x, width, m)
    if m > SCALED_ROWS:
        multiply = cast("Any", torch)._scaled_mm
        given = {"scale_a": x_scales[:, None], "scale_b": scales, "out_dtype": x.dtype}
        y = multiply(codes, w.T, use_fast_accum=True, **given)
        return y if bias is None else y + bias
    config = select_scaled(m, n, width, num_sms(x.device))
    y, sums = x.new_empty(m, n), None
    if config.splits > 1:
        sums = torch.empty(config.splits, m, n, dtype=torch.float32, device=x.device)
    scaled_product(codes, x_scales, w, scales, bias, y, sums, counters, config)
    return y


def _quantise(x: torch.Tensor, width: int, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of as many rows as the last of the sizes of scales, those after x's unset; scales."""
    from anabranch.kernels.layers.quantise_rows import quantise_rows

    codes = torch.empty(sizes[-1], width // 2, dtype=torch.int16, device=x.device)
    scales = torch.empty(sizes, dtype=torch.float32, device=x.device)
    quantise_rows(x, codes, scales, overlap=has_overlap(x.device))
    return codes.view(torch.float8_e4m3fn), scales


def _by_blocks(x: torch.Tensor, width: int, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """By torch: scales of rows lie one column of blocks after the other, in whole 16 bytes."""
    rows = -(-len(x) // 4) * 4
    codes, x_scales = _quantise(x, width, width // RUN, rows)
    scaling, multiply = cast("Any", functional).ScalingType, cast("Any", functional).scaled_mm
    own = scales.float().T.contiguous().T
    recipes = scaling.BlockWise1x128, scaling.BlockWise128x128
    given = codes, w.T, x_scales.T, recipes[0], own, recipes[1]
    return multiply(*given, output_dtype=x.dtype)[: len(x)]
