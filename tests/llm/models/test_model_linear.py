"""Linear layers that read weights in another order give what plain ones give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import nn

from anabranch.kernels.cpu.native import native
from anabranch.llm.models import row_linear as linear_module
from anabranch.llm.models.cpu_layers import PackedEmbedding, PackedLinear
from anabranch.llm.models.row_linear import use_row_linear

needs_compiler = pytest.mark.skipif(native() is None, reason="needs a C compiler")


@torch.no_grad()
@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 4, 5, 8, 9, 256, 257, 600])
@pytest.mark.parametrize(("size", "outputs"), [(64, 160), (64, 64), (64, 129), (300, 290), (24, 7)])
def test_values(bias: bool, num_rows: int, size: int, outputs: int) -> None:
    layer = nn.Linear(size, outputs, bias=bias)
    x = torch.randn(2, num_rows, size)[:1].transpose(1, 2).contiguous().transpose(1, 2)
    by_torch = layer(x)
    exact = layer.double()(x.double())
    assert use_row_linear(nn.Sequential(layer.float())) == 1
    assert isinstance(layer, PackedLinear)
    y = layer(x)
    assert y.shape == by_torch.shape
    assert_close(y, exact, by_torch)


@torch.no_grad()
@needs_compiler
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    layer = nn.Linear(600, 300)
    x = torch.randn(200, 600)
    use_row_linear(nn.Sequential(layer))
    whole = layer(x)
    for rows in (slice(0, 1), slice(3, 5), slice(11, 12), slice(6, 19), slice(190, 200)):
        assert torch.equal(layer(x[rows]), whole[rows])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight


def addresses(model: nn.Module) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}


@torch.no_grad()
@needs_compiler
def test_weights_are_held_once() -> None:
    model = Tied()
    weight, before = model.embedding.weight.detach().clone(), addresses(model)
    originals = list(model.parameters())
    use_row_linear(model)
    assert isinstance(model.head, PackedLinear) and isinstance(model.embedding, PackedEmbedding)
    assert model.head.packed is model.embedding.packed
    panels = -(-50 // 32)
    held = sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    assert held == panels * 32 * 8 + 2 * 8, "one copy, in panels of 32 rows, and the norm"
    assert not addresses(model) & before, "nothing keeps a mapped checkpoint alive"
    del originals
    tokens = torch.tensor([[0, 31, 49], [32, 1, 1]])
    assert torch.equal(model.embedding(tokens), weight[tokens])
    assert torch.equal(model.head.weight, weight)


def test_without_a_compiler_layers_stay_as_they_are(monkeypatch: Any) -> None:
    monkeypatch.setattr(linear_module, "native", lambda: None)
    model = Tied()
    assert use_row_linear(model) == 0
    assert type(model.head) is nn.Linear
    assert model.head.weight is model.embedding.weight


@torch.no_grad()
@needs_compiler
def test_packed_weights_follow_their_layer() -> None:
    model = Tied()
    layer = model.head
    use_row_linear(model)
    x = torch.randn(8, 8)
    twin = copy.deepcopy(layer)
    torch.testing.assert_close(twin(x), layer(x))
    expected = layer(x)
    model.double()
    torch.testing.assert_close(layer(x.double()).float(), expected)
    assert model.embedding(torch.tensor([3])).dtype == torch.float64


@needs_compiler
def test_an_input_of_another_size_or_dtype_is_refused() -> None:
    layer = nn.Linear(24, 40)
    use_row_linear(nn.Sequential(layer))
    for x in (torch.randn(2, 23), torch.randn(2, 24).double()):
        with pytest.raises(ValueError, match=r"input must be float32 \[..., 24\]"):
            layer(x)
