"""latent_inputs(): queries and rows of DeepSeek's attention by one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import assert_close

from anabranch.llm.models.latent_inputs import latent_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(
    num_tokens: int, num_heads: int, nope: int, rank: int, rotary: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Queries and latent columns side by side, as one projection gives them."""
    size = num_heads * (nope + rotary)
    joined = torch.randn(num_tokens, size + rank + rotary, device=DEVICE).to(dtype)
    q = joined[:, :size].unflatten(1, (num_heads, nope + rotary))
    angles = torch.rand(num_tokens, rotary // 2, device=DEVICE) * 6
    norm = torch.randn(rank, device=DEVICE).to(dtype)
    return [q, joined[:, size:], angles.cos(), angles.sin(), norm]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool) -> Any:
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def expected_inputs(
    q: torch.Tensor,
    latent: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor,
    neighbours: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, with the roundings of transformers' norm."""
    rank = len(norm)
    nope = q.shape[2] - latent.shape[1] + rank
    x = latent[:, :rank].to(torch.promote_types(latent.dtype, torch.float32))
    x = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(latent.dtype)
    rows = torch.cat([norm * x, rotated(latent[:, rank:], cos, sin, neighbours)], -1)
    turned = rotated(q[..., nope:], cos[:, None], sin[:, None], neighbours)
    return torch.cat([q[..., :nope], turned], -1), rows


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "nope", "rank", "rotary"),
    [
        (1, 4, 16, 32, 8),
        (3, 11, 12, 24, 6),
        (2, 1, 0, 8, 2),
        pytest.param(64, 16, 128, 512, 64, marks=pytest.mark.gpu),
        pytest.param(5, 128, 128, 512, 64, marks=pytest.mark.gpu),
    ],
)
def test_definition(
    num_tokens: int, num_heads: int, nope: int, rank: int, rotary: int, neighbours: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = operands(num_tokens, num_heads, nope, rank, rotary, dtype)
        exact = expected_inputs(*(x.double() for x in given), neighbours)
        torch_found = expected_inputs(*given, neighbours)
        actual = latent_inputs(*given, epsilon=1e-6, neighbours=neighbours)
        for ours, double, theirs in zip(actual, exact, torch_found, strict=True):
            assert ours.is_contiguous() and ours.dtype == dtype
            assert_close(ours.cpu(), double.cpu(), theirs.cpu())


def test_wider_angles_and_no_tokens() -> None:
    """DeepSeek-V3's cosines have a column for every rotary one, in the dtype of the model."""
    q, latent, cos, sin, norm = operands(3, 2, 4, 16, 8, torch.float32)
    expected = latent_inputs(q, latent, cos, sin, norm, epsilon=1e-6, neighbours=False)
    wide = (torch.cat([x, x], -1) for x in (cos, sin))
    actual = latent_inputs(q, latent, *wide, norm, epsilon=1e-6, neighbours=False)
    assert all(map(torch.equal, expected, actual))
    empty = [x[:0] for x in (q, latent, cos, sin)]
    found, rows = latent_inputs(*empty, norm, epsilon=1e-6, neighbours=True)
    assert found.shape == (0, 2, 12) and rows.shape == (0, 24)


def test_the_operator_is_well_formed() -> None:
    given = operands(3, 2, 4, 16, 8, torch.float32)
    torch.library.opcheck(torch.ops.anabranch.latent_inputs.default, (*given, 1e-6, True))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(2, 2, 12), "latent has num_tokens = 3, but q has num_tokens = 2"),
        (1, torch.zeros(3, 16), "leave 0 rotary columns"),
        (1, torch.zeros(3, 24).half(), "latent must be one of float32"),
        (2, torch.zeros(3, 3), "sin has columns = 4, but cos has columns = 3"),
        (4, torch.zeros(9), "leave 15 rotary columns"),
    ],
)
def test_inputs_refused(index: int, value: torch.Tensor, message: str) -> None:
    given = operands(3, 2, 4, 16, 8, torch.float32)
    given[index] = value.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        latent_inputs(*given, epsilon=1e-6, neighbours=True)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "deepseek-v3, halves"])
def test_layers_use_it_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from test_engine_models import config_of

    from anabranch.llm.models import latent_attention as module
    from anabranch.llm.models.attention_functions import known_to_transformers
    from anabranch.llm.runner.model_attention import NAME, collecting, register

    register()
    config = config_of(name)
    implementation = known_to_transformers(NAME)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    model = model.eval().to(DEVICE).requires_grad_(False)
    assert module.use_latent_attention(model) == 2
    outputs, calls = list[torch.Tensor](), list[int]()
    real = module.latent_inputs

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(len(given[0]))
        return real(*given, **options)

    monkeypatch.setattr(module, "latent_inputs", counted)
    model.lm_head.register_forward_hook(lambda *given: outputs.append(given[2]))
    for on_gpu in (False, True):
        monkeypatch.setattr(module, "_is_on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        with collecting():
            model(torch.arange(7, device=DEVICE)[None], use_cache=False)
    assert calls == [7, 7]
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=1e-4)
