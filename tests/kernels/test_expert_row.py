"""The experts of one token, against products of whole matrices."""

from __future__ import annotations

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional

from anabranch.kernels.layers import expert_row
from anabranch.llm.models.experts import mix_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mixed_row(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The definition, in the dtype of x."""
    gate, up = torch.einsum("k,enk->en", x[0], gate_up[experts[0]]).chunk(2, -1)
    inner = functional.silu(gate) * up
    rows = torch.einsum("en,ekn->ek", inner, down[experts[0]])
    return (rows * weights[0, :, None].to(x)).sum(0, keepdim=True)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "k", "n", "dtype"),
    [
        (5, 3, 40, 24, torch.float32),
        (3, 1, 100, 7, torch.float32),  # a part of a tile, an odd number of outputs
        (4, 2, 16, 96, torch.float32),  # tiles of several experts follow each other
        (4, 4, 72, 33, torch.bfloat16),
        pytest.param(64, 6, 2048, 1408, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(32, 8, 7168, 2048, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(8, 2, 4096, 14336, torch.float16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_one_token(
    num_experts: int,
    top_k: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if max(k, n) <= 100:
        monkeypatch.setattr(expert_row, "BLOCK_K", 32)
    gate_up = (torch.randn(num_experts, 2 * n, k, device=DEVICE) / k**0.5).to(dtype)
    down = (torch.randn(num_experts, k, n, device=DEVICE) / n**0.5).to(dtype)
    x = torch.randn(1, k, device=DEVICE).to(dtype)
    weights, experts = torch.rand(1, num_experts, device=DEVICE).topk(top_k)
    given = x, experts.int(), weights, gate_up, down
    exact = mixed_row(*(each.double() if each.is_floating_point() else each for each in given))
    assert_close(mix_experts(*given).cpu(), exact.cpu(), mixed_row(*given).cpu())


def test_one_token_is_put_in_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes two launches."""
    calls: list[str] = []
    for name in ("gate_row", "project_row"):
        real = getattr(expert_row, name)

        def counted(*given: object, name: str = name, real: object = real, **options: bool) -> None:
            calls.append(name)
            real(*given, **options)  # type: ignore[operator]

        monkeypatch.setattr(expert_row, name, counted)
    gate_up, down = torch.ones(3, 8, 16, device=DEVICE), torch.ones(3, 16, 4, device=DEVICE)
    experts, weights = torch.tensor([[2, 0]], device=DEVICE), torch.ones(1, 2, device=DEVICE)
    for num_tokens in (1, 2):
        given = (each.expand(num_tokens, -1) for each in (experts, weights))
        mix_experts(torch.ones(num_tokens, 16, device=DEVICE), *given, gate_up, down)
    assert calls == ["gate_row", "project_row"]
