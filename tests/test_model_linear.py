"""Linear layers that read weights in another order give what plain ones give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import nn

from anabranch.models import linear as linear_module
from anabranch.models.linear import CpuLinear, use_row_linear


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 8, 9, 256, 257, 600])
@pytest.mark.parametrize(("size", "outputs"), [(24, 40), (24, 24), (24, 10), (24, 7)])
@pytest.mark.parametrize("packed", [True, False])
def test_values(
    packed: bool, bias: bool, num_rows: int, size: int, outputs: int, monkeypatch: Any
) -> None:
    if not packed:
        monkeypatch.setattr(linear_module, "PACKED_BYTES", 0)
    layer = nn.Linear(size, outputs, bias=bias)
    x = torch.randn(2, num_rows, size)[:1].transpose(1, 2).contiguous().transpose(1, 2)
    by_torch = layer(x)
    exact = layer.double()(x.double())
    assert use_row_linear(nn.Sequential(layer.float())) == 1
    assert isinstance(layer, CpuLinear)
    assert (layer.packed is not None) == packed
    y = layer(x)
    assert y.shape == by_torch.shape
    assert_close(y, exact, by_torch)


def test_tied_weights_stay_tied() -> None:
    embedding = nn.Embedding(50, 8)
    head = nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    use_row_linear(nn.Sequential(embedding, head))
    assert isinstance(head, CpuLinear)
    assert head.weight is embedding.weight


@torch.no_grad()
def test_packed_weights_follow_their_layer() -> None:
    layer = nn.Linear(24, 40)
    use_row_linear(nn.Sequential(layer))
    x = torch.randn(8, 24)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))
    layer.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16
