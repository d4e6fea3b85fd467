"""Rows times quantised weights: by codes, by expanded weights, and by torch over e4m3 inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional

from anabranch.device import capability
from anabranch.kernels.layers.expand_codes import expand_codes
from anabranch.kernels.layers.gate_outputs import gate_outputs
from anabranch.kernels.layers.quantise_rows import quantise_rows
from anabranch.kernels.layers.quantised_config import (
    MOST_ROWS,
    NUM_COUNTERS,
    RUN,
    CodeConstants,
    QuantisedConfig,
    RowsConfig,
    code_tiles,
    every_config,
    fit_quantised,
    select_quantised,
    select_rows,
    select_scaled,
)
from anabranch.kernels.layers.quantised_product import CodeArguments, quantised_product
from anabranch.kernels.layers.quantised_rows import quantised_rows
from anabranch.kernels.layers.scaled_product import scaled_product
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised
from anabranch.llm.models.quantised_weight import (
    Codes,
    QuantisedWeight,
    join_quantised,
    pack_codes,
    unpack_codes,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
PACKED = HAS_GPU and capability(torch.device("cuda", 0)) >= (8, 0)
HALF = torch.float16
BRAIN = torch.bfloat16 if HAS_GPU else HALF  # the interpreter multiplies no bfloat16
# (kind, group_n, group_k, zeros)
FORMATS = {
    "fp8 channel": ("fp8", 1, None, False),
    "fp8 block": ("fp8", 128, 128, False),
    "int8": ("int8", 1, None, False),
    "int8 zeros": ("int8", 1, 32, True),
    "int4": ("int4", 1, 128, False),
    "int4 zeros": ("int4", 1, 64, True),
    "int4 short": ("int4", 1, 32, False),
    "int4 in groups of 16": ("int4", 1, 16, True),
    "int8 in groups of 16": ("int8", 1, 16, False),
    "int8 in groups of 48": ("int8", 1, 48, True),
    "int4 shortest": ("int4", 1, 8, True),
    "int4 channel": ("int4", 1, None, False),
    "int4 zeros of 128": ("int4", 1, 128, True),
}
SHAPES = [(1, 1, 8), (3, 37, 384), (16, 130, 256), (17, 64, 640), (50, 200, 200)]


def random_codes(name: str, n: int, k: int, device: str = DEVICE) -> Codes:
    kind, group_n, group_k, has_zeros = FORMATS[name]
    if kind == "fp8":
        codes = torch.randn(n, k).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = torch.randint(0, 16 if kind == "int4" else 256, (n, k), dtype=torch.uint8)
    groups = -(-n // group_n), -(-k // group_k) if group_k else 1
    scales = (torch.rand(groups) + 0.5) / 8
    zeros = None
    if has_zeros:
        zeros = torch.randint(-20, 20, groups) if kind == "int8" else torch.randint(0, 17, groups)
        zeros = zeros.to(device)
    return Codes(kind, codes.to(device), scales.to(device), zeros, group_n=group_n, group_k=group_k)


def numbers(given: Codes) -> torch.Tensor:
    """float64 [n, k], code by code."""
    n, k = given.codes.shape
    rows = torch.arange(n, device=given.codes.device)[:, None] // given.group_n
    columns = torch.arange(k, device=given.codes.device)[None, :] // (given.group_k or k)
    if given.kind == "fp8":
        values = given.codes.view(torch.float8_e4m3fn).double()
    else:
        signed = given.codes.view(torch.int8) if given.kind == "int8" else given.codes
        none = 8 if given.kind == "int4" else 0
        values = signed.double() - (none if given.zeros is None else given.zeros[rows, columns])
    return values * given.scales[rows, columns].double()


def arguments(weight: QuantisedWeight) -> tuple[CodeArguments, CodeConstants]:
    given = CodeArguments(weight.words.data, weight.scales.data, weight.zeros)
    return given, replace(weight.constants, packed=PACKED)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def fits(name: str, k: int) -> bool:
    group = FORMATS[name][2]
    return group is None or name == "fp8 block" or k % group == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_product(name: str, m: int, n: int, k: int) -> None:
    if not fits(name, k):
        pytest.skip("groups that the columns do not divide into are refused")
    given = random_codes(name, n, k)
    weight, constants = arguments(QuantisedWeight(given))
    if not constants.has_product:
        pytest.skip("expanded")
    x = torch.randn(m, k).to(DEVICE, BRAIN)
    bias = torch.randn(n).to(DEVICE, BRAIN) if m == 3 else None
    w = numbers(given)
    expected = functional.linear(x.double(), w, None if bias is None else bias.double())
    by_torch = functional.linear(x, w.to(x.dtype), bias)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    for splits in (1, 2):
        block_m = 16 if m <= 16 else 32
        config = QuantisedConfig(block_m, 64, 4, 2, splits=splits, overlap=False)
        sums = poisoned(splits, m, n, dtype=torch.float32) if splits > 1 else None
        y = poisoned(m, n, dtype=BRAIN)
        quantised_product(x, weight, bias, y, sums, counters, constants, config)
        assert_close(y, expected, by_torch)
        assert not counters.any()


ROWS = [
    RowsConfig(8, 16, 4, 4, overlap=False),
    RowsConfig(16, 32, 4, 2, overlap=False),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 8), (3, 37, 384), (8, 48, 1152), (17, 64, 640)])
@pytest.mark.parametrize("config", ROWS)
def test_few_rows(name: str, m: int, n: int, k: int, config: RowsConfig) -> None:
    """Straight from memory, by warps that share columns; gated where halves are whole eights."""
    if not fits(name, k):
        pytest.skip("groups that the columns do not divide into are refused")
    given = random_codes(name, n, k)
    weight, constants = arguments(QuantisedWeight(given))
    if not constants.has_rows:
        pytest.skip("a run is shorter than what threads take at a time")
    x = torch.randn(m, k).div(16).to(DEVICE, BRAIN)
    bias = torch.randn(n).to(DEVICE, BRAIN) if m == 3 else None
    w = numbers(given)
    expected = functional.linear(x.double(), w, None if bias is None else bias.double())
    by_torch = functional.linear(x, w.to(x.dtype), bias)
    y = poisoned(m, n, dtype=BRAIN)
    quantised_rows(x, weight, bias, y, constants, config)
    assert_close(y, expected, by_torch)
    if n % 16 == 0:
        y = poisoned(m, n // 2, dtype=BRAIN)
        quantised_rows(x, weight, None, y, constants, config, gated=True)
        (gate, up), (gate_16, up_16) = expected.chunk(2, -1), by_torch.chunk(2, -1)
        assert_close(y, functional.silu(gate) * up, functional.silu(gate_16) * up_16)


@pytest.mark.skipif(HAS_GPU, reason="the interpreter's; GPUs have a test of whole layers")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 128), (17, 64, 256), (50, 200, 640)])
@pytest.mark.parametrize("splits", [1, 2])
def test_e4m3_by_e4m3(m: int, n: int, k: int, splits: int) -> None:
    given = random_codes("fp8 channel", n, k)
    held = QuantisedWeight(given)
    x = torch.randn(m, k).to(DEVICE, BRAIN)
    words = torch.empty(m, k // 2, dtype=torch.int16, device=DEVICE)
    scales = poisoned(m, dtype=torch.float32)
    quantise_rows(x, words, scales)
    config = QuantisedConfig(16 if m <= 16 else 32, 64, 4, 2, splits, overlap=False)
    y = poisoned(m, n, dtype=BRAIN)
    sums = poisoned(splits, m, n, dtype=torch.float32) if splits > 1 else None
    codes, w = (each.view(torch.float8_e4m3fn) for each in (words, held.words.data))
    scaled_product(codes, scales, w, held.scales.data, None, y, sums, held.counters, config)
    scale = x.double().abs().amax(1, keepdim=True) / 448
    rounded = (x.double() / scale).to(torch.float8_e4m3fn).double() * scale
    expected = functional.linear(rounded, numbers(given))
    assert_close(y, expected, functional.linear(rounded.to(BRAIN), numbers(given).to(BRAIN)))
    assert not held.counters.any()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 2049)])
def test_gate(m: int, n: int) -> None:
    joined, y = torch.randn(m, 2 * n).to(DEVICE, BRAIN), poisoned(m, n, dtype=BRAIN)
    gate_outputs(joined, y)
    gate, up = joined.chunk(2, -1)
    expected = functional.silu(gate.double()) * up.double()
    assert_close(y, expected, functional.silu(gate) * up)


def test_float16_and_strided_rows() -> None:
    given = random_codes("int4 zeros", 40, 192)
    weight, constants = arguments(QuantisedWeight(given))
    wide = poisoned(5, 256, dtype=HALF)
    x = wide[:, :192]
    x.copy_(torch.randn(5, 192))
    y = poisoned(5, 40, dtype=HALF)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=DEVICE)
    config = QuantisedConfig(16, 64, 4, 2, overlap=False)
    quantised_product(x, weight, None, y, None, counters, constants, config)
    w = numbers(given)
    assert_close(y, functional.linear(x.double(), w), functional.linear(x, w.half()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 8), (130, 384), (70, 200)])
def test_expanded(name: str, n: int, k: int) -> None:
    if not fits(name, k):
        pytest.skip("groups that the columns do not divide into are refused")
    given = random_codes(name, n, k)
    held = QuantisedWeight(given, dtype=BRAIN)
    weight, constants = arguments(held)
    w = poisoned(n, k, dtype=BRAIN)
    expand_codes(weight, w, constants)
    exact = numbers(given)
    assert_close(w, exact, exact.to(BRAIN))
    assert_close(held.expanded(), exact, exact.to(BRAIN))


@pytest.mark.parametrize("k", [8, 128, 200, 1000])
def test_rows_as_e4m3(k: int) -> None:
    """In the order of a weight's columns; zero after the last."""
    x = torch.randn(3, k).to(DEVICE, BRAIN)
    x[1] = 0
    words = torch.full((3, -(-k // RUN) * RUN // 2), -1, dtype=torch.int16, device=DEVICE)
    scales = poisoned(3, dtype=torch.float32)
    quantise_rows(x, words, scales)
    codes = unpack_codes(words, CodeConstants("fp8", 1, RUN))
    assert not codes[:, k:].any()
    values = codes[:, :k].contiguous().view(torch.float8_e4m3fn).double()
    assert values.abs().amax(1).tolist() == [448, 0, 448]
    found = values * scales[:, None].double()
    largest = x.double().abs().amax(1, keepdim=True)
    # half a step of the last of 3 bits of mantissa, or of the smallest numbers
    allowed = (x.double().abs() / 16).clamp_min(largest / 448 / 512)
    assert ((found - x.double()).abs() <= allowed * 1.001).all()


@pytest.mark.parametrize("k", [128, 200, 1000])
def test_rows_as_e4m3_by_run(k: int) -> None:
    """Each run of a row as a row of its own; rows that are only room stay as they are."""
    runs = -(-k // RUN)
    x = torch.randn(3, k).to(DEVICE, BRAIN)
    words = torch.full((3, runs * RUN // 2), -1, dtype=torch.int16, device=DEVICE)
    scales = poisoned(runs, 4, dtype=torch.float32)
    quantise_rows(x, words, scales)
    parts = functional.pad(x, (0, -k % RUN)).view(3 * runs, RUN).contiguous()
    expected = torch.empty(3 * runs, RUN // 2, dtype=torch.int16, device=DEVICE)
    expected_scales = poisoned(3 * runs, dtype=torch.float32)
    quantise_rows(parts, expected, expected_scales)
    assert torch.equal(words.view(3 * runs, -1), expected)
    assert torch.equal(scales[:, :3].T.reshape(-1), expected_scales)
    assert scales[:, 3].isnan().all()


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("k", [1, 64, 130, 256])
def test_packing_is_undone(kind: str, k: int) -> None:
    constants = CodeConstants(kind, 1, RUN)
    codes = torch.randint(0, 16 if kind == "int4" else 256, (5, k), dtype=torch.uint8)
    words = pack_codes(codes, constants)
    assert words.nbytes == 5 * -(-k // RUN) * RUN // (2 if kind == "int4" else 1)
    assert torch.equal(unpack_codes(words, constants)[:, :k], codes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 5, MOST_ROWS + 1])
def test_layer(name: str, rows: int) -> None:
    """Of joined weights, for each number of rows the product that is chosen."""
    given = [random_codes(name, n, 256) for n in (128, 256)]
    joined = join_quantised([QuantisedWeight(each, dtype=BRAIN) for each in given])
    linear = torch.nn.Linear(256, 384, bias=True).to(DEVICE, BRAIN).requires_grad_(False)
    set_quantised(linear, joined)
    assert isinstance(linear, QuantisedLinear)
    x = torch.randn(2, rows, 256).to(DEVICE, BRAIN)
    w, bias = torch.cat([numbers(each) for each in given]), linear.bias.double()
    expected, actual = functional.linear(x.double(), w, bias), linear(x)
    if rows:
        assert_close(actual, expected, functional.linear(x, w.to(BRAIN), linear.bias))
    assert actual.shape == expected.shape
    assert torch.equal(linear.weight, w.to(BRAIN))


def test_what_is_joined() -> None:
    """Weights of one format whose groups end with them."""

    def joins(name: str, n: int, k: int = 256) -> tuple[object, ...]:
        return QuantisedWeight(random_codes(name, n, k)).joins

    assert joins("fp8 block", 128) == joins("fp8 block", 256)
    assert joins("fp8 block", 130) != joins("fp8 block", 130)
    assert joins("int4", 8) != joins("int4 channel", 8)
    assert joins("int4", 8) != joins("int4", 8, 384)
    assert joins("int8", 8) != joins("fp8 channel", 8)


KINDS = [CodeConstants("fp8", 1, 4096), CodeConstants("int4", 1, 128), CodeConstants("int4", 1, 32)]


@pytest.mark.parametrize("constants", KINDS)
def test_choice(constants: CodeConstants) -> None:
    """Every choice is among those that are compiled, and has enough counters."""
    assert select_quantised(constants, MOST_ROWS + 1, 4096, 4096, 132) is None
    few = select_quantised(constants, 17, 4096, 4096, 132)
    assert few is not None and few.splits > 1
    wide = select_quantised(constants, 17, 28672, 4096, 132)
    assert wide is not None and wide.splits == 1
    known = {replace(config, splits=1) for config in every_config(*code_tiles(constants))}
    for rows in range(1, MOST_ROWS + 1):
        for n in (64, 4096, 28672):
            config = select_quantised(constants, rows, n, 14336, 264)
            assert config is not None
            tiles = -(-n // config.block_n) * -(-rows // config.block_m)
            assert config.splits == 1 or tiles <= NUM_COUNTERS
            assert replace(config, splits=1) in known


def test_choice_for_few_rows() -> None:
    fp8, int4, short = KINDS
    assert select_rows(fp8, 9, 4096, 132) is None and select_rows(int4, 17, 4096, 132) is None
    assert select_rows(CodeConstants("int4", 1, 8), 1, 4096, 132) is None
    for constants in (fp8, int4, short):
        for n in (16, 6144, 28672):
            config = select_rows(constants, 8, n, 132)
            assert config is not None and config.runs % config.num_warps == 0


def test_choice_of_e4m3() -> None:
    assert select_scaled(64, 4096, 4096, 132).splits == 2
    assert select_scaled(64, 28672, 4096, 132).splits == 1


def test_stages_fit() -> None:
    config = QuantisedConfig(32, 128, 8, 4)
    fp8 = KINDS[0]
    assert fit_quantised(config, fp8, shared_bytes=227 << 10, hopper=True) == config
    fitted = fit_quantised(config, fp8, shared_bytes=64 << 10, hopper=False)
    assert fitted == replace(config, num_stages=2, overlap=False)


def test_groups_are_checked() -> None:
    given = random_codes("int4", 8, 256)
    wrong = Codes("int4", given.codes, given.scales[:, :1], group_k=128)
    with pytest.raises(ValueError, match=r"scales must be \[8, 2\] .* got \[8, 1\]"):
        QuantisedWeight(wrong)


def test_operator_is_well_formed() -> None:
    weight = QuantisedWeight(random_codes("int4", 64, 128), dtype=BRAIN)
    x = torch.randn(3, 128).to(DEVICE, BRAIN)
    settings = "int4", 1, 128, False, False
    given = x, weight.words, weight.scales, None, weight.counters, None, *settings
    torch.library.opcheck(
        torch.ops.anabranch.quantised_linear.default,
        given,
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiles_once_for_any_number_of_rows() -> None:
    linear = torch.nn.Linear(128, 64, bias=False, device="meta")
    set_quantised(linear, QuantisedWeight(random_codes("int4", 64, 128), dtype=BRAIN))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: 2 * linear.gated(x), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 1):  # one row is compiled by itself
        compiled(torch.randn(rows, 128).to(DEVICE, BRAIN))
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (5, 1, 40, MOST_ROWS + 1):
            x = torch.randn(rows, 128).to(DEVICE, BRAIN)
            assert torch.equal(compiled(x), 2 * linear.gated(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 8, 16, 17, 64, 200, 300])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336)])
def test_sizes_of_real_models(name: str, m: int, n: int, k: int) -> None:
    given = random_codes(name, n, k)
    linear = torch.nn.Linear(k, n, bias=False, device="meta")
    set_quantised(linear, QuantisedWeight(given, dtype=BRAIN))
    x = torch.randn(m, k).to(DEVICE, BRAIN)
    w = numbers(given)
    expected = functional.linear(x.double(), w)
    assert_close(linear(x), expected, functional.linear(x, w.to(BRAIN)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 channel", "fp8 block"])
@pytest.mark.parametrize("m", [33, 64, 66, 130, 501])
def test_e4m3_inputs(name: str, m: int) -> None:
    """Inputs are rounded to 3 bits of mantissa where there are so many rows."""
    given = random_codes(name, 4096, 4096)
    linear = torch.nn.Linear(4096, 4096, bias=False, device="meta")
    set_quantised(linear, QuantisedWeight(given, dtype=BRAIN, fp8_inputs=True))
    x = torch.randn(m, 4096).to(DEVICE, BRAIN)
    rounded = x.double()
    if name == "fp8 channel" or m > 64:
        parts = rounded.view(-1, 4096 if name == "fp8 channel" else RUN)
        scale = parts.abs().amax(1, keepdim=True) / 448
        rounded = (parts / scale).to(torch.float8_e4m3fn).double() * scale
    rounded = rounded.view_as(x)
    w = numbers(given)
    expected = functional.linear(rounded, w)
    assert_close(linear(x), expected, functional.linear(rounded.to(BRAIN), w.to(BRAIN)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 64])
def test_graph_with_other_inputs(rows: int) -> None:
    """Columns are split, and kernels that overlap wait for each other."""
    weights = [QuantisedWeight(random_codes("int4", 4096, 4096)) for _ in range(3)]
    linears = [torch.nn.Linear(4096, 4096, bias=False, device="meta") for _ in weights]
    for linear, weight in zip(linears, weights, strict=True):
        set_quantised(linear, weight)
    x = torch.zeros(rows, 4096, dtype=BRAIN, device="cuda")
    layers = torch.nn.Sequential(*linears)
    layers(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layers(x)
    for _ in range(20):
        x.normal_().mul_(1e-3)
        graph.replay()
        assert torch.equal(y, layers(x))
