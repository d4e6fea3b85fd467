"""Gated feed-forward blocks by one product for gate and up, and the gate within it."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from anabranch.llm.models.join import JoinedLinears, JoinedPart
from anabranch.llm.models.packed_linear import PackedLinear
from anabranch.llm.models.quantised_linear import QuantisedLinear
from anabranch.llm.models.row_linear import gated_linear

TOLERANCE = 0.05  # of the largest output; the products of two 16-bit roundings stay far below


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, joined: JoinedLinears, down: nn.Module) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the separate projections would give."""
        joined = self.joined.linear
        if isinstance(joined, PackedLinear | QuantisedLinear):
            return self.down_proj(joined.gated(x))
        return self.down_proj(gated_linear(x, joined.weight))


@torch.inference_mode()
def gate_joined(model: nn.Module) -> int:
    """Replace joined feed-forward blocks that are gated by silu, in place; how many.

    A block is replaced only if it gives the same numbers for a random input, whatever its class.
    """
    count = 0
    for parent in list(model.modules()):
        for name, block in list(parent.named_children()):
            gated = _gated(block)
            if gated is not None and _agree(block, gated):
                setattr(parent, name, gated)
                count += 1
    return count


def _gated(block: nn.Module) -> GatedMLP | None:
    joined = getattr(block, "joined_gate_proj", None)
    down = getattr(block, "down_proj", None)
    parts = [getattr(block, name, None) for name in ("gate_proj", "up_proj")]
    if not isinstance(joined, JoinedLinears) or joined.linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        return None
    if not isinstance(down, nn.Linear) or not all(isinstance(part, JoinedPart) for part in parts):
        return None
    return GatedMLP(joined, down)


def _agree(block: nn.Module, gated: GatedMLP) -> bool:
    joined = gated.joined.linear
    x = torch.randn(1, 2, joined.in_features, dtype=torch.float32)
    if isinstance(joined, QuantisedLinear):
        x = x.to(joined.quantised.scales.device, joined.quantised.dtype)
    elif not isinstance(joined, PackedLinear):
        x = x.to(joined.weight)
    try:
        expected, actual = cast("torch.Tensor", block(x)), gated(x)
    except (TypeError, ValueError, RuntimeError):
        return False  # it takes more than an input
    if not isinstance(expected, torch.Tensor) or expected.shape != actual.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        return False
    difference = (expected - actual).abs().max()
    return bool(difference <= TOLERANCE * expected.abs().max())
