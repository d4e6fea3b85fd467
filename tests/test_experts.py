"""mix_experts(): chosen experts by kernels, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional

from anabranch.kernels.expert_config import every_expert_config, fit_experts, select_experts
from anabranch.kernels.triton.expert_order import order_experts
from anabranch.models import experts as module
from anabranch.models.experts import mix_experts, use_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_EXPERTS, K, N = 5, 40, 24


def operands(num_tokens: int, top_k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Random choices, none twice for a token; the last expert gets no rows."""
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1)
    weights, experts = scores.topk(top_k)
    gate_up = torch.randn(NUM_EXPERTS, 2 * N, K) / K**0.5
    down = torch.randn(NUM_EXPERTS, K, N) / N**0.5
    given = torch.randn(num_tokens, K), gate_up, down
    x, gate_up, down = (tensor.to(DEVICE, dtype) for tensor in given)
    return [x, experts.to(DEVICE), weights.to(DEVICE), gate_up, down]


def mixed(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The definition, in the dtype of x."""
    outs = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            gate, up = functional.linear(x[token], gate_up[expert]).chunk(2)
            row = functional.linear(functional.silu(gate) * up, down[expert])
            outs[token] += weights[token, choice].to(x) * row
    return outs


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "dtype"),
    [
        (1, 3, torch.float16),
        (7, 2, torch.float16),
        pytest.param(7, 2, torch.bfloat16, marks=pytest.mark.gpu),  # no dot in the interpreter
        (60, 2, torch.float16),
        (200, 3, torch.float16),
        (9, 1, torch.float32),
    ],
    ids=str,
)
def test_mix(num_tokens: int, top_k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    given = operands(num_tokens, top_k, dtype)
    exact = mixed(*(x.double() if x.is_floating_point() else x for x in given))
    assert_close(mix_experts(*given).cpu(), exact.cpu(), mixed(*given).cpu())


def test_no_tokens() -> None:
    assert mix_experts(*operands(0, 2, torch.float16)).shape == (0, K)


@pytest.mark.parametrize("num_rows", [1, 16, 1024, 2500, 9000])
def test_order_is_stable(num_rows: int) -> None:
    experts = torch.randint(0, 7, (num_rows,), device=DEVICE)
    order = torch.full((num_rows,), -1, dtype=torch.int32, device=DEVICE)
    starts = torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    counters = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    order_experts(experts, order, starts, counters)
    assert torch.equal(order.long(), experts.argsort(stable=True))
    assert starts.tolist() == [int((experts < e).sum()) for e in range(9)]
    assert counters.tolist() == [0, 0]


def test_tiles_grow_with_rows_and_fit() -> None:
    heights = [select_experts(rows, 64).block_m for rows in (6, 384, 2048, 49152)]
    assert heights == sorted(heights)
    for config in every_expert_config():
        for shared in (64, 99, 227):
            fitted = fit_experts(config, itemsize=2, shared_bytes=shared << 10)
            assert fitted.shared_bytes(2) <= shared << 10
            assert fitted.block_k >= 16


def test_the_operator_is_well_formed() -> None:
    given = operands(3, 2, torch.float32)
    torch.library.opcheck(torch.ops.anabranch.mix_experts.default, tuple(given))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(3, 7), "x has k = 7, but down has k = 40"),
        (1, torch.zeros(3, 2), "experts must be one of int32, int64"),
        (2, torch.zeros(3, 4), "weights has top_k = 4, but experts has top_k = 2"),
        (3, torch.zeros(5, 44, 40), "gate_up has 2n = 44, but down has 2n = 48"),
        (3, torch.zeros(5, 48, 40).half(), "gate_up must be one of float32"),
        (4, torch.zeros(40, 5, 24).transpose(0, 1), "down must be contiguous"),
    ],
)
def test_refuses(index: int, value: torch.Tensor, message: str) -> None:
    given = operands(3, 2, torch.float32)
    given[index] = value.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        mix_experts(*given)


class Recorded:
    """Experts of transformers in the kernels here, on a CPU under the interpreter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = module.mix_experts

        def counted(*given: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return real(*given)

        monkeypatch.setattr(module, "mix_experts", counted)


@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3Moe", "GptOss"])
def test_models_use_it_where_experts_are_plain(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from test_engine_models import LATENT, SHAPE

    shape = {k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}
    own: dict[str, Any] = {
        "DeepseekV3": LATENT | {"n_group": 2, "topk_group": 1},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": None},
    }
    config = getattr(transformers, f"{family}Config")(**(shape | own[family]))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().to(DEVICE).requires_grad_(False)
    ids = torch.arange(2, 9, device=DEVICE)[None]
    expected = model(ids).logits
    monkeypatch.setattr(module, "_is_on_gpu", lambda model: True)
    recorded = Recorded(monkeypatch)
    assert use_experts(model)
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)
    layers = {"DeepseekV3": 1, "Qwen3Moe": 2, "GptOss": 0}
    assert recorded.count == layers[family]


def test_models_without_experts_or_without_a_gpu_stay_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    from test_engine_models import SHAPE

    shape = {k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    assert not use_experts(model)
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(shape | experts)))
    assert not use_experts(model)
    assert model.config._experts_implementation != module.NAME
