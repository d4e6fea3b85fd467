"""Experts whose weights are codes, against a loop over tokens and the numbers codes stand for."""

from __future__ import annotations

import pytest
import torch
from test_experts import mixed
from test_quantised_product import BRAIN, DEVICE, numbers, random_codes
from tolerance import assert_close

from anabranch.kernels.layers import expert_row
from anabranch.kernels.layers.quantised_config import (
    CodeConstants,
    every_code_experts,
    select_code_experts,
)
from anabranch.llm.models.code_experts import mix_quantised_experts
from anabranch.llm.models.expert_weights import by_output, join_experts
from anabranch.llm.models.quantised_weight import Codes, QuantisedWeight

NUM_EXPERTS = 5
# (format, columns of x, columns between the products)
CASES = {
    "fp8 in blocks": ("fp8 block", 256, 128),
    "fp8 in cut blocks": ("fp8 block", 200, 24),
    "fp8": ("fp8 channel", 200, 40),
    "int8": ("int8", 136, 24),
    "int4": ("int4", 256, 128),
    "int4 with zeros": ("int4 short", 96, 64),
    "int8 with zeros": ("int8 zeros", 64, 96),
}


def join(parts: list[Codes]) -> QuantisedWeight:
    joined = join_experts([QuantisedWeight(by_output(part), dtype=BRAIN) for part in parts])
    assert joined is not None
    return joined


def drawn(name: str, k: int, n: int) -> tuple[list[QuantisedWeight], list[torch.Tensor]]:
    """Both weights of all experts, and their numbers in float64."""
    gates = [random_codes(name, n, k) for _ in range(2 * NUM_EXPERTS)]
    downs = [random_codes(name, k, n) for _ in range(NUM_EXPERTS)]
    for codes in (*gates, *downs):  # for products of about 1
        codes.scales.div_(float(numbers(codes).std()) * codes.codes.shape[1] ** 0.5)
    wide = [torch.stack([numbers(each) for each in codes]) for codes in (gates, downs)]
    return [join(gates), join(downs)], [wide[0].view(NUM_EXPERTS, 2 * n, k), wide[1]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 3), (7, 2), (50, 2), (200, 2)])
def test_mix(case: str, num_tokens: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, k, n = CASES[case]
    if num_tokens == 200 and case != "fp8":
        pytest.skip("the same kernel with higher tiles")
    monkeypatch.setattr(expert_row, "BLOCK_K", 64)  # several tiles
    held, wide = drawn(name, k, n)
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1)  # the last expert gets no rows
    weights, experts = (each.to(DEVICE) for each in scores.topk(top_k))
    x = torch.randn(num_tokens, k).to(DEVICE, BRAIN)
    exact = mixed(x.double(), experts, weights.double(), *wide)
    rounded = mixed(x, experts, weights, *(each.to(BRAIN) for each in wide))
    found = mix_quantised_experts(x, experts, weights, *held)
    assert_close(found.cpu(), exact.cpu(), rounded.cpu())


def test_no_tokens() -> None:
    held, _ = drawn("fp8 channel", 64, 32)
    experts = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    x = torch.zeros(0, 64, dtype=BRAIN, device=DEVICE)
    assert mix_quantised_experts(x, experts, experts.float(), *held).shape == (0, 64)


def test_blocks_that_end_within_an_expert() -> None:
    codes = random_codes("fp8 block", 200, 256)
    found = by_output(codes)
    assert found.group_n == 1 and torch.equal(numbers(found), numbers(codes))
    whole = random_codes("fp8 block", 256, 256)
    assert by_output(whole) is whole


def test_formats_that_differ_are_not_joined() -> None:
    fp8, int4 = (QuantisedWeight(random_codes(x, 8, 64)) for x in ("fp8 channel", "int4 short"))
    assert join_experts([fp8, int4]) is None
    short = QuantisedWeight(random_codes("int4 shortest", 8, 64))
    assert join_experts([short, short]) is None
    single = QuantisedWeight(random_codes("fp8 channel", 8, 64), dtype=torch.float32)
    assert join_experts([single]) is None


@pytest.mark.parametrize(
    ("x", "experts", "message"),
    [
        (torch.zeros(3, 40), (3, 2), "x has k = 40, but gate_up has k = 64"),
        (torch.zeros(3, 64, dtype=torch.float64), (3, 2), "x must be one of float16, bfloat16"),
        (torch.zeros(3, 64), (4, 2), "experts has num_tokens = 4, but x has num_tokens = 3"),
    ],
)
def test_refuses(x: torch.Tensor, experts: tuple[int, int], message: str) -> None:
    held, _ = drawn("fp8 channel", 64, 32)
    x = x.to(DEVICE, BRAIN if x.dtype == torch.float32 else x.dtype)
    chosen = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        mix_quantised_experts(x, chosen, chosen.float(), *held)


def test_refuses_weights_of_other_shapes() -> None:
    held, _ = drawn("fp8 channel", 64, 32)
    x, chosen = torch.zeros(3, 64, dtype=BRAIN), torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gate_up \[640, 64\] and down \[640, 64\] must be"):
        gate_up = join_experts([held[0], held[0]])
        assert gate_up is not None
        mix_quantised_experts(x.to(DEVICE), chosen.to(DEVICE), chosen.float(), gate_up, gate_up)


def test_the_operator_is_well_formed() -> None:
    held, _ = drawn("fp8 channel", 64, 32)
    chosen = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    tensors = [each for weight in held for each in (weight.words, weight.scales, weight.zeros)]
    settings = [
        each
        for weight in held
        for each in (weight.constants.kind, weight.constants.group_n, weight.constants.group_k)
    ]
    x = torch.randn(3, 64).to(DEVICE, BRAIN)
    torch.library.opcheck(
        torch.ops.anabranch.mix_quantised_experts.default,
        (x, chosen, chosen.float(), *tensors, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_tiles_grow_with_rows() -> None:
    fp8, short = CodeConstants("fp8", 128, 128), CodeConstants("int4", 1, 32)
    heights = [select_code_experts(fp8, rows, 64).block_m for rows in (6, 1024, 4096, 50000)]
    assert heights == [16, 16, 64, 128]
    assert select_code_experts(short, 50000, 64).block_m == 64
    assert len(every_code_experts(fp8)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 block", "fp8 channel", "int4", "int4 short"])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 1024])
def test_sizes_of_real_models(name: str, num_tokens: int) -> None:
    """DeepSeek-V2-Lite's, with fewer experts."""
    held, wide = drawn(name, 2048, 1408)
    weights, experts = torch.rand(num_tokens, NUM_EXPERTS, device=DEVICE).topk(3)
    x = torch.randn(num_tokens, 2048).to(DEVICE, BRAIN)
    exact = mixed(x.double(), experts, weights.double(), *wide)
    rounded = mixed(x, experts, weights, *(each.to(BRAIN) for each in wide))
    found = mix_quantised_experts(x, experts, weights, *held)
    assert_close(found.cpu(), exact.cpu(), rounded.cpu())


def test_compiles_once_for_any_number_of_tokens() -> None:
    held, _ = drawn("fp8 channel", 64, 32)
    torch._dynamo.reset()

    def mix(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return 2 * mix_quantised_experts(x, experts, weights, *held)

    compiled = torch.compile(mix, fullgraph=True, dynamic=True, backend="aot_eager")

    def given(num_tokens: int) -> list[torch.Tensor]:
        weights, experts = torch.rand(num_tokens, NUM_EXPERTS).topk(2)
        x = torch.randn(num_tokens, 64, dtype=BRAIN)
        return [each.to(DEVICE) for each in (x, experts, weights)]

    for num_tokens in (3, 1):  # one token is compiled by itself
        compiled(*given(num_tokens))
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (5, 1, 20):
            inputs = given(num_tokens)
            assert torch.equal(compiled(*inputs), mix(*inputs))
