"""route_experts(): the routers of DeepSeek models by one launch, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_engine_models import config_of  # noqa: E402
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (  # noqa: E402
    DeepseekV2TopkRouter,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3TopkRouter,
)

from anabranch.kernels.layers.route_config import fit_route, select_route, shared_bytes_of  # noqa: E402
from anabranch.kernels.layers.route_experts import num_places  # noqa: E402
from anabranch.llm.models import router as module  # noqa: E402
from anabranch.llm.models.router import route_experts, use_router  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITED = {"topk_method": "group_limited_greedy"}
ROUTERS: dict[str, tuple[Any, Any]] = {
    "v2": (transformers.DeepseekV2Config, DeepseekV2TopkRouter),
    "v3": (transformers.DeepseekV3Config, DeepseekV3TopkRouter),
}
# Family, experts, chosen ones, groups, chosen ones, and options
SHAPES: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "v2": ("v2", 64, 6, 1, 1, {"topk_method": "greedy"}),
    "v2, few": ("v2", 8, 3, 1, 1, {"topk_method": "greedy", "routed_scaling_factor": 2.5}),
    "v2, groups": ("v2", 20, 3, 4, 2, LIMITED),
    "v2, groups of three": ("v2", 18, 5, 6, 2, LIMITED | {"routed_scaling_factor": 16.0}),
    "v3": ("v3", 64, 8, 8, 4, {}),
    "v3, one group": ("v3", 12, 2, 1, 1, {}),
    "v3, not normalised": ("v3", 8, 2, 2, 1, {"norm_topk_prob": False}),
}


def router(name: str, k: int, dtype: torch.dtype = torch.float32) -> Any:
    """A router of transformers with random weights."""
    family, num_experts, top_k, num_groups, top_groups, options = SHAPES[name]
    make, kind = ROUTERS[family]
    config = make(
        hidden_size=k,
        num_attention_heads=2,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        n_group=num_groups,
        topk_group=top_groups,
        **options,
    )
    found = kind(config).requires_grad_(False)
    found.weight = torch.nn.Parameter(torch.randn(num_experts, k) / k**0.5, requires_grad=False)
    if family == "v3":
        found.e_score_correction_bias = torch.randn(num_experts) / 4
    found.weight.data = found.weight.data.to(dtype)
    return found.to(DEVICE)


def used(given: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same router by the kernel, also in the interpreter."""
    monkeypatch.setattr(module, "is_on_gpu", lambda model: True)
    assert use_router(given) == 1
    return given


def assert_same(expected: tuple[Any, ...], actual: tuple[Any, ...]) -> None:
    """Experts are the same in some order, with the same weights up to rounding."""
    (_, expected_weights, expected_experts), (_, weights, experts) = expected, actual
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    experts, places = experts.long().sort(1)
    expected_experts, expected_places = expected_experts.sort(1)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(
        weights.gather(1, places), expected_weights.gather(1, expected_places)
    )


@pytest.mark.parametrize("name", SHAPES)
def test_routers_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token and more than a block of them; columns in one part and in several."""
    for k, sizes in ((40, (1, 17)), (300, (1, 5))):
        given = router(name, k)
        inputs = [torch.randn(size, k, device=DEVICE) for size in sizes]
        expected = [given(x) for x in inputs]
        used(given, monkeypatch)
        for x, wanted in zip(inputs, expected, strict=True):
            assert_same(wanted, given(x))
        assert not given.counters.any()


@pytest.mark.parametrize(("name", "k"), [("v2", 40), ("v3", 520)])
def test_many_tokens(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, x = router(name, k), torch.randn(300, k, device=DEVICE)
    expected = given(x)
    assert_same(expected, used(given, monkeypatch)(x))


@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float16", "float32")], ids=str)
def test_products_of_16_bits_are_summed_in_float32(
    dtypes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x_dtype, dtype = (getattr(torch, each) for each in dtypes)
    given, x = router("v2", 300, dtype), torch.randn(9, 300, device=DEVICE).to(x_dtype)
    expected = given(x)
    assert_same(expected, used(given, monkeypatch)(x))


def test_equal_scores_go_to_the_first_experts() -> None:
    x, weight = torch.ones(3, 16, device=DEVICE), torch.ones(8, 16, device=DEVICE)
    experts, weights = route_experts(x, weight, top_k=3)
    assert experts.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 8))
    bias = torch.tensor([0.0, 0, 0, 0, 1, 1, 0, 0], device=DEVICE)
    options: Any = {"top_k": 3, "num_groups": 4, "top_groups": 2, "sigmoid": True}
    experts, _ = route_experts(x, weight, bias, **options)
    assert experts.tolist() == [[4, 5, 0]] * 3  # the first group ties with two others


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_not_a_number_leads_to_an_expert() -> None:
    """Rows that no sequence owns may hold anything."""
    x = torch.full((2, 16), float("nan"), device=DEVICE)
    for sigmoid in (False, True):
        experts, weights = route_experts(
            x, torch.ones(6, 16, device=DEVICE), top_k=4, sigmoid=sigmoid
        )
        assert experts.tolist() == [[0, 1, 2, 3]] * 2
        assert weights.isnan().all()


def test_more_experts_than_the_best_groups_have() -> None:
    """As transformers: softmax gives the others no weight."""
    weight = torch.eye(8, 16, device=DEVICE)
    x = torch.linspace(1, 8, 16, device=DEVICE)[None]
    experts, weights = route_experts(x, weight, top_k=3, num_groups=4, top_groups=1)
    assert experts.tolist() == [[7, 6, 0]]
    assert weights[0, 1] > 0 and weights[0, 2] == 0


def test_no_tokens() -> None:
    experts, weights = route_experts(
        torch.empty(0, 16, device=DEVICE), torch.ones(8, 16, device=DEVICE), top_k=2
    )
    assert experts.shape == weights.shape == (0, 2)


def test_counters_of_a_call_are_made_where_none_are_given() -> None:
    x, weight = torch.randn(20, 600, device=DEVICE), torch.randn(8, 600, device=DEVICE)
    few = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for counters in (None, few, few.new_zeros(64)):
        experts, _ = route_experts(x, weight, None, counters, top_k=2)
        assert torch.equal(experts.long(), (x @ weight.T).topk(2).indices)
        assert counters is None or not counters.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(3, 7)}, "x has k = 7, but weight has k = 16"),
        ({"x": torch.zeros(3, 16).int()}, "x must be one of float16, bfloat16, float32"),
        ({"weight": torch.zeros(16, 8).T}, "weight must have contiguous rows"),
        ({"bias": torch.zeros(7)}, "bias has num_experts = 7, but weight has num_experts = 8"),
        ({"counters": torch.zeros(4)}, "counters must be one of int32"),
        ({"top_k": 9}, "top_k must be 1 to 8, got 9"),
        ({"num_groups": 3}, "num_groups must divide 8 experts, got 3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups must be 1 to 4, got 5"),
    ],
)
def test_route_refuses(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(3, 16), "weight": torch.zeros(8, 16), "top_k": 2}
    given |= changes
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(ValueError, match=message):
        route_experts(**moved)


def test_the_operator_is_well_formed() -> None:
    x, weight = torch.randn(3, 300, device=DEVICE), torch.randn(8, 300, device=DEVICE)
    counters = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    given = x, weight, None, counters, 2, 1, 1, False, False, 1.0
    torch.library.opcheck(torch.ops.anabranch.route_experts.default, given)


def test_tiles_fit() -> None:
    """Whole tiles of the weight for few tokens, all columns of a token for many."""
    for num_experts, num_groups, k in ((64, 1, 2048), (160, 8, 5120), (256, 8, 7168)):
        places = num_places(num_experts, num_groups)
        assert places % num_groups == 0 and places >= num_experts
        for num_tokens in (1, 256, 257, 1024, 100_000):
            config = select_route(num_tokens, places, k)
            assert places % config.block_e == 0
            for itemsize, shared in ((2, 99), (4, 64), (4, 227)):
                fitted = fit_route(
                    config, itemsize=itemsize, shared_bytes=shared << 10, hopper=shared == 227
                )
                assert not fitted.overlap or shared == 227
                assert shared_bytes_of(fitted, itemsize) <= shared << 10
        assert config.splits == 1 and config.block_e == min(places, 128)


@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v2, query of low rank, groups", "deepseek-v3"]
)
def test_models_use_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().to(DEVICE).requires_grad_(False)
    ids = torch.arange(2, 9, device=DEVICE)[None]
    expected = model(ids).logits
    if DEVICE == "cpu":
        assert not use_router(model)
        assert model.model.layers[1].mlp.gate(torch.zeros(1, 64))[0] is not None
    monkeypatch.setattr(module, "is_on_gpu", lambda model: True)
    calls: list[int] = []
    real = module.route_experts

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(len(given[0]))
        return real(*given, **options)

    monkeypatch.setattr(module, "route_experts", counted)
    assert use_router(model) == 1
    torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-4)
    assert calls == [7]
    assert not use_router(model)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16, 17, 64, 256, 257, 300, 1500, 8192])
@pytest.mark.parametrize(
    ("family", "num_experts", "top_k", "num_groups", "top_groups", "k"),
    [("v2", 64, 6, 1, 1, 2048), ("v2", 160, 6, 8, 3, 5120), ("v3", 256, 8, 8, 4, 7168)],
)
def test_shapes_of_models(
    family: str,
    num_experts: int,
    top_k: int,
    num_groups: int,
    top_groups: int,
    k: int,
    num_tokens: int,
) -> None:
    """In bfloat16, where no two experts are so close that the order of a sum decides.

    Called twice in a graph, so that counters are used again.
    """
    x = torch.randn(num_tokens, k, device=DEVICE).bfloat16()
    weight = (torch.randn(num_experts, k, device=DEVICE) / k**0.5).bfloat16()
    bias = torch.randn(num_experts, device=DEVICE) / 8 if family == "v3" else None
    sigmoid = family == "v3"
    options: Any = {"num_groups": num_groups, "top_groups": top_groups, "sigmoid": sigmoid}
    options |= {"top_k": top_k, "normalised": sigmoid, "scale": 2.5}
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    route_experts(x, weight, bias, counters, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        route_experts(x, weight, bias, counters, **options)
        experts, weights = route_experts(x, weight, bias, counters, **options)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert not counters.any()

    logits = x.double() @ weight.double().T
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias.double()
    grouped = choice.unflatten(1, (num_groups, -1))
    best = grouped.topk(2 if sigmoid else 1).values.sum(-1)
    edges = best.sort(1, descending=True).values
    clear = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE)
    if top_groups < num_groups:
        clear = (edges[:, top_groups - 1] - edges[:, top_groups]) > 1e-4
        kept = torch.zeros_like(best).scatter_(1, best.topk(top_groups).indices, 1).bool()
        choice = grouped.masked_fill(~kept[..., None], -1.0).flatten(1)
    ordered, order = choice.sort(1, descending=True)
    gaps = ordered[:, :top_k] - ordered[:, 1 : top_k + 1]
    clear &= (gaps > 1e-4 * ordered[:, :1]).all(1)
    assert clear.float().mean() > 0.5
    expected = scores.gather(1, order[:, :top_k])
    if sigmoid:
        expected = expected / expected.sum(1, keepdim=True)
    assert torch.equal(experts.long()[clear], order[clear, :top_k])
    torch.testing.assert_close(weights[clear].double(), 2.5 * expected[clear], rtol=1e-4, atol=1e-7)
