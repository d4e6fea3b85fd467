"""Projections that read the same input are made one matrix: fewer launches, longer reads.

A decoder layer calls its q, k and v projections one after the other, and gate and up. The first
call multiplies by all of them; the others take their part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from anabranch.llm.models.packed_linear import PackedLinear, set_packed
from anabranch.llm.models.packed_weight import join_weights
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised
from anabranch.llm.models.quantised_weight import join_quantised

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),  # DeepSeek's, without and with a query of low rank
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


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
    """Stands where one of the linear maps stood."""

    def __init__(self, joined: JoinedLinears, index: int) -> None:
        super().__init__()
        self._joined = [joined]  # in a list, so that its weights are counted once
        self._index = index
        self.in_features = joined.linear.in_features
        self.out_features = joined.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the linear map would give."""
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
    """What linear maps have in common that are joined."""
    if isinstance(linear, QuantisedLinear):
        held = linear.quantised.joins
    else:
        held = None if isinstance(linear, PackedLinear) else linear.weight.dtype
    return linear.in_features, held, linear.bias is None  # pyright: ignore[reportUnnecessaryComparison]
