"""Products of few tokens with the up-projection, by kernels and by torch."""

from __future__ import annotations

import pytest
import torch
from tolerance import assert_close

from anabranch import up_projection as module
from anabranch.up_projection import FEW_TOKENS, UpProjection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = pytest.mark.gpu


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "nope", "rotary", "rank", "head_dim_v"),
    [
        (1, 2, 16, 8, 32, 12),
        (3, 3, 12, 6, 72, 20),
        (17, 1, 16, 4, 528, 16),
        (66, 1, 8, 2, 16, 4),
        pytest.param(1, 16, 128, 64, 512, 128, marks=REAL),
        pytest.param(8, 128, 128, 64, 512, 128, marks=REAL),
        pytest.param(FEW_TOKENS, 16, 128, 64, 512, 128, marks=REAL),
    ],
)
def test_absorbed_queries_and_values(
    num_tokens: int,
    num_heads: int,
    nope: int,
    rotary: int,
    rank: int,
    head_dim_v: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against products in float64; torch's in 16 bits give the tolerance."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    weight = torch.randn(num_heads, nope + head_dim_v, rank, device=DEVICE) / nope**0.5
    wide = torch.randn(num_tokens, num_heads * (nope + rotary) + 8, device=DEVICE)
    latent = torch.randn(num_tokens, num_heads, rank + rotary, device=DEVICE)
    up = UpProjection(weight.to(dtype), nope)
    q = wide[:, 8:].unflatten(1, (num_heads, nope + rotary)).to(dtype)
    latent = latent.to(dtype)[..., :rank]
    exact = UpProjection(up.weight.double(), nope)
    found: list[list[torch.Tensor]] = []
    for few in (False, True):
        monkeypatch.setattr(module, "_are_few", lambda x, few=few: few)
        found.append([up.absorb(q).cpu(), up.values(latent).cpu()])
    monkeypatch.setattr(module, "_are_few", lambda x: False)
    wanted = exact.absorb(q.double()).cpu(), exact.values(latent.double()).cpu()
    for theirs, ours, double in zip(*found, wanted, strict=True):
        assert_close(ours, double, theirs)
    assert torch.equal(found[0][0][..., rank:], found[1][0][..., rank:])


@pytest.mark.gpu
def test_few_tokens_in_16_bits_go_to_the_kernels() -> None:
    x = torch.zeros(FEW_TOKENS + 1, 1, 8, device="cuda", dtype=torch.bfloat16)
    assert module._are_few(x[1:]) and not module._are_few(x)
    assert not module._are_few(x[:0]) and not module._are_few(x[1:].float())


def test_a_cpu_has_torch() -> None:
    assert not module._are_few(torch.zeros(1, 1, 8, dtype=torch.float16))
