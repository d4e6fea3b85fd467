"""mix_experts(): chosen experts by kernels, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tolerance import assert_close
from torch.nn import functional

from anabranch.device import capability, num_sms
from anabranch.kernels.layers import expert_product as portable
from anabranch.kernels.layers import hopper_experts as hopper
from anabranch.kernels.layers.expert_config import (
    HOPPER_ROWS,
    ExpertTiles,
    every_expert_config,
    fit_experts,
    select_expert_tiles,
    select_experts,
)
from anabranch.kernels.layers.expert_order import order_experts
from anabranch.kernels.layers.expert_product import find_tile
from anabranch.llm.models import experts as module
from anabranch.llm.models.experts import mix_experts, use_experts

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


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_choices_may_have_any_strides(num_tokens: int) -> None:
    x, experts, weights, *rest = operands(num_tokens, 2, torch.float32)
    wide = [torch.stack([each, each * 0], 2).flatten(1)[:, ::2] for each in (experts, weights)]
    assert wide[0].stride() == (4, 2)
    assert torch.equal(mix_experts(x, *wide, *rest), mix_experts(x, experts, weights, *rest))


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


@triton.jit
def list_tiles_kernel(starts_ptr, tiles_ptr, num_experts, num_columns, EXPERTS: tl.constexpr):
    ticket = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    expert, start, stop, column = find_tile(
        starts_ptr, ticket, experts, num_experts, num_columns, 4
    )
    tl.store(tiles_ptr + ticket * 4, expert)
    tl.store(tiles_ptr + ticket * 4 + 1, start)
    tl.store(tiles_ptr + ticket * 4 + 2, stop)
    tl.store(tiles_ptr + ticket * 4 + 3, column)


@pytest.mark.parametrize("num_columns", [1, 3])
def test_tickets_name_every_tile_once(num_columns: int) -> None:
    starts = torch.tensor([0, 0, 5, 9, 9, 10], dtype=torch.int32, device=DEVICE)
    tiles = torch.full((4 * num_columns + 2, 4), -1, dtype=torch.int32, device=DEVICE)
    list_tiles_kernel[(len(tiles),)](starts, tiles, 5, num_columns, EXPERTS=8)
    rows = {1: [(0, 4), (4, 5)], 2: [(5, 9)], 4: [(9, 10)]}
    expected = [
        [expert, *tile, column]
        for expert, own in rows.items()
        for column in range(num_columns)
        for tile in own
    ]
    assert tiles[: 4 * num_columns].tolist() == expected
    assert all(start >= stop for _, start, stop, _ in tiles[4 * num_columns :].tolist())


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


def test_hopper_multiplies_many_rows_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = select_experts(1000, NUM_EXPERTS), list[str]()

    def gate(x: Any, w: Any, order: Any, starts: Any, counter: Any, y: Any, *_: object) -> None:
        calls.append(f"gate {counter.tolist()}")
        portable.gate_experts(x, w, order, starts, y, config)

    def project(*given: Any) -> None:
        x, w, order, starts, counter, weights, y, *_ = given
        calls.append(f"project {counter.tolist()}")
        portable.project_experts(x, w, order, starts, weights, y, config)

    monkeypatch.setattr(hopper, "gate_experts", gate)
    monkeypatch.setattr(hopper, "project_experts", project)
    many = HOPPER_ROWS * NUM_EXPERTS // 2 + 1
    given = operands(many, 2, torch.float16)
    for major, taken in ((8, []), (9, ["gate [0]", "project [0]"])):
        calls.clear()
        monkeypatch.setattr(module, "capability", lambda _, major=major: (major, 0))
        y = mix_experts(*given)
        assert calls == taken
    exact = mixed(*(x.double() if x.is_floating_point() else x for x in given))
    assert_close(y.cpu(), exact.cpu(), mixed(*given).cpu())
    calls.clear()
    mix_experts(*operands(many, 2, torch.float32))
    mix_experts(*operands(3, 2, torch.float16))
    shifted = torch.empty(many * K + 1, dtype=torch.float16, device=DEVICE)[1:].view(many, K)
    mix_experts(shifted.copy_(given[0]), *given[1:])
    narrow = given[0][:, :36], *given[1:3], given[3][..., :36], given[4][:, :36]
    mix_experts(*(x.contiguous() for x in narrow))
    assert not calls


IS_HOPPER = DEVICE == "cuda" and capability(torch.device("cuda"))[0] == 9


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "k", "n"),
    [
        (1, 5, 2, 64, 64),
        (3, 40, 3, 128, 256),  # most experts have no rows
        (64, 2, 1, 72, 128),
        (129, 64, 1, 136, 8),
        (300, 5, 2, 904, 1000),
        (1500, 7, 3, 200, 136),  # several tiles of rows and columns
        (2000, 300, 2, 256, 264),
    ],
)
def test_hopper_products(
    num_tokens: int, num_experts: int, top_k: int, k: int, n: int, dtype: torch.dtype
) -> None:
    x, w, down = (
        torch.randn(*shape, dtype=dtype, device=DEVICE) / shape[-1] ** 0.5
        for shape in ((num_tokens, k), (num_experts, 2 * n, k), (num_experts, k, n))
    )
    scores = torch.rand(num_tokens, num_experts, device=DEVICE)
    scores[:, 1] = -1  # no rows, unless there are no other experts
    weights, experts = scores.topk(top_k)
    num_rows = num_tokens * top_k
    order, starts, counters = (
        torch.empty(size, dtype=torch.int32, device=DEVICE)
        for size in (num_rows, num_experts + 1, 2)
    )
    order_experts(experts.reshape(-1), order, starts, counters)
    inner = torch.full((num_rows, n), float("nan"), dtype=dtype, device=DEVICE)
    outer = torch.full((num_rows, k), float("nan"), dtype=dtype, device=DEVICE)
    one, two = counters.split(1)
    routed, programs = (order, starts), num_sms(x.device)
    hopper.gate_experts(x, w, *routed, one, inner, ExpertTiles(), programs)
    rows, places = order.long(), experts.reshape(-1)[order.long()]
    halves = [
        by_expert(x.to(kind)[rows // top_k], w.to(kind), places).chunk(2, -1)
        for kind in (torch.float64, dtype)
    ]
    exact, rounded = (functional.silu(gate) * up for gate, up in halves)
    assert_close(inner.cpu(), exact.cpu(), rounded.cpu())
    given = inner, down, *routed, two, weights.reshape(-1), outer, ExpertTiles(), programs
    hopper.project_experts(*given)
    exact, rounded = (
        by_expert(inner.to(kind), down.to(kind), places) * weights.reshape(-1, 1)[rows].to(kind)
        for kind in (torch.float64, dtype)
    )
    assert_close(outer[rows].cpu(), exact.cpu(), rounded.cpu())


def by_expert(x: torch.Tensor, w: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Each row times the weights of its expert."""
    y = x.new_empty(x.shape[0], w.shape[1])
    for expert, weight in enumerate(w):
        y[experts == expert] = functional.linear(x[experts == expert], weight)
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [4, 700])
def test_graphs_route_anew(num_tokens: int) -> None:
    given = operands(num_tokens, 2, torch.bfloat16)
    mix_experts(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mix_experts(*given)
    for seed in range(3):
        torch.manual_seed(seed)
        x, experts, weights, *_ = operands(num_tokens, 2, torch.bfloat16)
        for own, new in zip(given, (x, experts, weights), strict=False):
            own.copy_(new)
        graph.replay()
        assert torch.equal(y, mix_experts(*given))


def test_few_rows_are_the_triton_kernels() -> None:
    assert select_expert_tiles(HOPPER_ROWS * 64 - 1, 64) is None
    assert select_expert_tiles(HOPPER_ROWS * 64, 64) is not None


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
    monkeypatch.setattr(module, "is_on_gpu", lambda model: True)
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
