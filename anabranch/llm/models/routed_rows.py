"""What experts of numbers and of codes have in common: rows in their order, sums, one token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from anabranch.device import has_overlap
from anabranch.kernels.layers.quantised_config import CodeConstants

if TYPE_CHECKING:
    from anabranch.kernels.layers.expert_row import ExpertWeight


class RoutedRows(NamedTuple):
    """Rows of tokens in the order of experts, and room for their products."""

    order: torch.Tensor  # int32 [num_rows]
    starts: torch.Tensor  # int32 [num_experts + 1]
    counters: torch.Tensor  # int32 [2], 0
    weights: torch.Tensor  # [num_rows]
    inner: torch.Tensor  # [num_rows, n]
    outer: torch.Tensor  # [num_rows, k]


def route_rows(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int, n: int
) -> RoutedRows:
    from anabranch.kernels.layers.expert_order import order_experts

    num_rows, k = experts.numel(), x.shape[1]
    integers = partial(torch.empty, dtype=torch.int32, device=x.device)
    order, starts, counters = integers(num_rows), integers(num_experts + 1), integers(2)
    order_experts(experts.reshape(-1).contiguous(), order, starts, counters)
    inner, outer = x.new_empty(num_rows, n), x.new_empty(num_rows, k)
    return RoutedRows(order, starts, counters, weights.reshape(-1).contiguous(), inner, outer)


def add_up(x: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    from anabranch.kernels.layers.expert_sum import sum_experts

    y = torch.empty_like(x)
    sum_experts(outer, y)
    return y


def mix_row(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    n: int,
    gate_up: tuple[ExpertWeight, CodeConstants | None],
    down: tuple[ExpertWeight, CodeConstants | None],
) -> torch.Tensor:
    """For one token, whose experts each have one row."""
    from anabranch.kernels.layers.expert_row import gate_row, project_row

    y, inner = x.new_empty(x.shape), x.new_empty(experts.shape[1], n)
    row, chosen, weights = (given.reshape(-1).contiguous() for given in (x, experts, weights))
    overlap = has_overlap(x.device)
    gate_row(row, gate_up[0], chosen, inner, gate_up[1], overlap=overlap)
    project_row(inner, down[0], chosen, weights, y[0], down[1], overlap=overlap)
    return y
