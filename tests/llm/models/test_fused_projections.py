"""Joined projections give what separate ones give, whatever calls them in whatever order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anabranch.llm.models.fused_projections import (
    JoinedLinears,
    JoinedPart,
    gate_joined,
    join_projections,
)


class Layer(nn.Module):
    def __init__(self, *, bias: bool = False, v_in: int = 8) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 6, bias=bias)
        self.v_proj = nn.Linear(v_in, 6, bias=bias)
        self.gate_proj = nn.Linear(8, 10, bias=bias)
        self.up_proj = nn.Linear(8, 10, bias=bias)


NAMES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1], NAMES + NAMES, ("k_proj", "k_proj")])
def test_values(bias: bool, order: tuple[str, ...]) -> None:
    layer = Layer(bias=bias)
    inputs = [torch.randn(2, 3, 8) for _ in range(2)]
    expected = {name: [getattr(layer, name)(x) for x in inputs] for name in NAMES}
    assert join_projections(layer) == 2
    for step, x in enumerate((*inputs, inputs[0])):
        for name in order:
            torch.testing.assert_close(getattr(layer, name)(x), expected[name][step % 2])
    for name in order:  # inputs in turn: nothing of the other is given back
        for x, wanted in zip(inputs, expected[name], strict=True):
            torch.testing.assert_close(getattr(layer, name)(x), wanted)


@torch.no_grad()
def test_an_input_that_was_overwritten_is_computed_again() -> None:
    layer = Layer()
    join_projections(layer)
    x = torch.randn(1, 8)
    for name in NAMES:
        getattr(layer, name)(x)
    first = layer.q_proj(x.clone())
    x.mul_(2)
    torch.testing.assert_close(layer.q_proj(x), 2 * first)


def test_memory_is_held_once() -> None:
    layer = Layer(bias=True)
    before = sum(weight.numel() for weight in layer.parameters())
    join_projections(layer)
    assert sum(weight.numel() for weight in layer.parameters()) == before
    assert not any(weight.requires_grad for weight in layer.parameters())
    assert (layer.q_proj.in_features, layer.q_proj.out_features) == (8, 12)


def test_what_was_computed_is_not_kept() -> None:
    layer = Layer()
    join_projections(layer)
    x = torch.randn(1, 8)
    for name in NAMES:
        getattr(layer, name)(x)
    for module in layer.modules():
        if isinstance(module, JoinedLinears):
            assert module._input is None and not any(p is not None for p in module._parts)


def test_only_plain_siblings_of_one_input_are_joined() -> None:
    assert join_projections(Layer(v_in=9)) == 1, "v reads something else"
    layer = Layer()
    layer.k_proj = nn.Linear(8, 6, bias=True)
    layer.up_proj = nn.Linear(8, 10).double()
    assert join_projections(layer) == 0
    layer = Layer()
    layer.k_proj = type("Quantised", (nn.Linear,), {})(8, 6)
    del layer.up_proj
    assert join_projections(layer) == 0
    assert not any(isinstance(module, JoinedPart) for module in layer.modules())
    assert join_projections(nn.Linear(3, 3)) == 0


class Gated(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 10, bias=False)
        self.up_proj = nn.Linear(8, 10, bias=False)
        self.down_proj = nn.Linear(10, 8, bias=False)
        self.act_fn = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@torch.no_grad()
@pytest.mark.parametrize(("activation", "count"), [(nn.SiLU(), 1), (nn.GELU(), 0), (nn.ReLU(), 0)])
def test_blocks_gated_by_silu_are_replaced_and_no_others(activation: nn.Module, count: int) -> None:
    model = nn.Sequential(Gated(activation))
    x = torch.randn(1, 3, 8)
    expected = model(x)
    join_projections(model)
    assert gate_joined(model) == count
    torch.testing.assert_close(model(x), expected)
