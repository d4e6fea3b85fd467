"""Queries of few tokens absorbed by a kernel and by torch."""

from __future__ import annotations

import pytest
import torch
from tolerance import assert_close

from anabranch.compositions import up_projection as module
from anabranch.compositions.up_projection import FEW_TOKENS, UpProjection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = pytest.mark.gpu


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "nope", "rotary", "rank"),
    [
        (1, 2, 16, 8, 32),
        (3, 3, 12, 6, 72),
        (17, 1, 16, 4, 528),
        (66, 1, 8, 2, 16),
        pytest.param(1, 16, 128, 64, 512, marks=REAL),
        pytest.param(8, 128, 128, 64, 512, marks=REAL),
        pytest.param(FEW_TOKENS, 16, 128, 64, 512, marks=REAL),
    ],
)
def test_absorbed_queries(
    num_tokens: int,
    num_heads: int,
    nope: int,
    rotary: int,
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against products in float64; torch's in 16 bits give the tolerance."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    weight = torch.randn(num_heads, nope + 4, rank, device=DEVICE) / nope**0.5
    wide = torch.randn(num_tokens, num_heads * (nope + rotary) + 8, device=DEVICE)
    up = UpProjection(weight.to(dtype), nope)
    q = wide[:, 8:].unflatten(1, (num_heads, nope + rotary)).to(dtype)
    exact = UpProjection(up.weight.double(), nope)
    found: list[torch.Tensor] = []
    for few in (True, False):
        monkeypatch.setattr(module, "_are_few", lambda x, few=few: few)
        found.append(up.absorb(q).cpu())
    ours, theirs = found
    assert_close(ours, exact.absorb(q.double()).cpu(), theirs)
    assert torch.equal(ours[..., rank:], theirs[..., rank:])


def test_a_weight_in_another_order_is_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 2, 20, device=DEVICE).permute(1, 2, 0)
    q = torch.randn(3, 2, 24, device=DEVICE)
    expected = UpProjection(weight.contiguous(), 16).absorb(q)
    monkeypatch.setattr(module, "_are_few", lambda x: True)
    torch.testing.assert_close(UpProjection(weight, 16).absorb(q), expected)


@pytest.mark.gpu
def test_few_tokens_in_16_bits_go_to_the_kernel() -> None:
    x = torch.zeros(FEW_TOKENS + 1, 1, 8, device="cuda", dtype=torch.bfloat16)
    assert module._are_few(x[1:]) and not module._are_few(x)
    assert not module._are_few(x[:0]) and not module._are_few(x[1:].float())


def test_a_cpu_has_torch() -> None:
    assert not module._are_few(torch.zeros(1, 1, 8, dtype=torch.float16))
