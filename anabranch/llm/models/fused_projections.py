"""Projections that read the same input are made one matrix: fewer launches, longer reads.

A decoder layer calls its q, k and v projections one after the other, and gate and up. The first
call multiplies by all of them; the others take their part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from anabranch.llm.models.cpu_layers import (
    PackedLinear,
    agrees,
    join_weights,
    replace_modules,
    set_packed,
)
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised
from anabranch.llm.models.quantised_weight import join_quantised
from anabranch.llm.models.row_linear import gated_linear

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),  # DeepSeek's, without and with a query of low rank
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
TOLERANCE = 0.05  # of the largest output; the products of two 16-bit roundings stay far below


class JoinedLinears(nn.Module):
    """Several linear maps of one input."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.linear = _concatenate(linears)
        self.sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def take(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """One map of `x`; all of them are computed when the first is asked for."""
        if self._input is not x or self._parts[index] is None:
            self._input, self._parts = x, list(torch.split(self.linear(x), self.sizes, -1))
        part = self._parts[index]
        assert part is not None
        self._parts[index] = None
        if all(other is None for other in self._parts):
            self._input = None
        return part


def _concatenate(linears: list[nn.Linear]) -> nn.Linear:
    outputs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    if isinstance(linears[0], PackedLinear):
        packed = [cast("PackedLinear", linear).packed for linear in linears]
        set_packed(joined, join_weights(packed))
    elif isinstance(linears[0], QuantisedLinear):
        held = [cast("QuantisedLinear", linear).quantised for linear in linears]
        set_quantised(joined, join_quantised(held))
    else:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        bias = torch.cat([linear.bias.detach() for linear in linears])
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


class JoinedPart(nn.Module):
    """Takes the place of one of the linear maps."""

    def __init__(self, joined: JoinedLinears, index: int) -> None:
        super().__init__()
        self._joined = [joined]  # in a list, so that its weights are counted once
        self._index = index
        self.in_features = joined.linear.in_features
        self.out_features = joined.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joined[0].take(x, self._index)


def join_projections(model: nn.Module) -> int:
    """Join siblings throughout a model, in place; how many groups were joined."""
    count = 0
    for module in list(model.modules()):
        for names in SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if not _joinable(linears):
                continue
            joined = JoinedLinears(cast("list[nn.Linear]", linears))
            module.add_module(f"joined_{names[0]}", joined)
            for index, name in enumerate(names):
                setattr(module, name, JoinedPart(joined, index))
            count += 1
    return count


def _joinable(linears: Sequence[object]) -> bool:
    if not all(type(linear) in (nn.Linear, PackedLinear, QuantisedLinear) for linear in linears):
        return False
    return len({_kind(linear) for linear in cast("list[nn.Linear]", linears)}) == 1


def _kind(linear: nn.Linear) -> tuple[object, ...]:
    """What linear maps must have in common to be joined."""
    if isinstance(linear, QuantisedLinear):
        held = linear.quantised.joins
    else:
        held = None if isinstance(linear, PackedLinear) else linear.weight.dtype
    return linear.in_features, held, linear.bias is None  # pyright: ignore[reportUnnecessaryComparison]


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, joined: JoinedLinears, down: nn.Module) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.joined.linear
        if isinstance(joined, PackedLinear | QuantisedLinear):
            return self.down_proj(joined.gated(x))
        return self.down_proj(gated_linear(x, joined.weight))


@torch.inference_mode()
def gate_joined(model: nn.Module) -> int:
    """Replace joined feed-forward blocks that are gated by silu, in place; how many.

    A block is replaced only if it gives the same numbers for a random input, whatever its class.
    """
    return replace_modules(model, _gated)


def _gated(block: nn.Module) -> GatedMLP | None:
    joined = getattr(block, "joined_gate_proj", None)
    down = getattr(block, "down_proj", None)
    parts = [getattr(block, name, None) for name in ("gate_proj", "up_proj")]
    if not isinstance(joined, JoinedLinears) or joined.linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        return None
    if not isinstance(down, nn.Linear) or not all(isinstance(part, JoinedPart) for part in parts):
        return None
    gated = GatedMLP(joined, down)
    return gated if _agree(block, gated) else None


def _agree(block: nn.Module, gated: GatedMLP) -> bool:
    joined = gated.joined.linear
    x = torch.randn(1, 2, joined.in_features, dtype=torch.float32)
    if isinstance(joined, QuantisedLinear):
        x = x.to(joined.quantised.scales.device, joined.quantised.dtype)
    elif not isinstance(joined, PackedLinear):
        x = x.to(joined.weight)
    try:
        return agrees(block(x), gated(x), TOLERANCE)
    except (TypeError, ValueError, RuntimeError):
        return False  # it takes more than an input
