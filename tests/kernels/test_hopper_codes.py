"""The Hopper kernel over codes against float64, and how its programs share the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from test_quantised_product import BRAIN, FORMATS, HALF, numbers, poisoned, random_codes
from tolerance import assert_close
from torch.nn import functional

from anabranch.device import capability
from anabranch.kernels.layers.code_units import next_tile, own_units, owners, place_of
from anabranch.kernels.layers.hopper_code_config import (
    LEAST_ROWS,
    NARROW,
    SMALL,
    SQUARE,
    TALL,
    WIDE,
    CodeTileConstants,
    CodeTiles,
    code_tile_constants,
    select_code_tiles,
)
from anabranch.kernels.layers.hopper_codes import hopper_codes
from anabranch.kernels.layers.quantised_config import NUM_COUNTERS, CodeConstants
from anabranch.kernels.layers.quantised_product import CodeArguments
from anabranch.llm.models.quantised_weight import QuantisedWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_HOPPER = DEVICE == "cuda" and capability(torch.device("cuda", 0))[0] == 9
INT4 = CodeConstants("int4", 1, 128)
TILES = (NARROW, WIDE, SQUARE, TALL)
SIZES = (LEAST_ROWS - 1, 64, 128, 256, 512, 1024)


def constants_of(tiles: CodeTiles) -> CodeTileConstants:
    return code_tile_constants(tiles, INT4, grouped=True, split_scales=False)


@triton.jit
def list_units_kernel(units_ptr, m, n, k, C: tl.constexpr):
    """Of each program: its units, and where it leaves sums of each of them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    work = own_units(program, programs, m, n, k, C)
    unit, end, output_tile, row_tile, run, num_units, num_runs, row_tiles = work
    while unit < end:
        first, last = owners(unit - run, num_runs, num_units, programs)
        fields = units_ptr + unit * 6
        tl.store(fields, output_tile)
        tl.store(fields + 1, row_tile)
        tl.store(fields + 2, run)
        tl.store(fields + 3, first)
        tl.store(fields + 4, last)
        tl.store(fields + 5, place_of(program, first))
        unit += 1
        run += 1
        if run == num_runs:
            run = 0
            output_tile, row_tile = next_tile(output_tile, row_tile, row_tiles)


@pytest.mark.parametrize(("m", "n", "k"), [(17, 64, 128), (65, 300, 640), (300, 130, 1000)])
@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 10])
def test_programs_share_every_unit(m: int, n: int, k: int, num_programs: int) -> None:
    c = constants_of(CodeTiles(64, 2, 4))
    tiles = [(i, j) for i in range(-(-n // 128)) for j in range(-(-m // 64))]
    num_runs = -(-k // 128)
    units = torch.full((len(tiles) * num_runs, 6), -1, dtype=torch.int32, device=DEVICE)
    num_programs = min(num_programs, len(units))
    list_units_kernel[(num_programs,)](units, m, n, k, C=c)
    found = units.tolist()
    expected = [(*tile, run) for tile in tiles for run in range(num_runs)]
    assert [tuple(each[:3]) for each in found] == expected
    places: dict[int, tuple[int, int]] = {}
    for *tile, _, first, last, place in found:
        assert first <= place // 2 <= last
        if first < last:  # only these leave sums
            assert places.setdefault(place, tuple(tile)) == tuple(tile)
    for tile in tiles:
        own = [each for each in found if tuple(each[:2]) == tile]
        assert {each[5] // 2 for each in own} == set(range(own[0][3], own[0][4] + 1))


@pytest.mark.parametrize("tiles", TILES)
def test_tiles_fit(tiles: CodeTiles) -> None:
    c = constants_of(tiles)
    assert tiles.stages <= 8  # named barriers
    assert c.stages * c.stage_bytes + tiles.consumers * (4 << 10) <= 227 << 10
    assert 264 * tiles.consumers <= NUM_COUNTERS
    assert 128 * (c.consumer_registers * c.consumers + 24) <= 128 * c.registers * (c.consumers + 1)


def test_choice() -> None:
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    chosen = {m: [select_code_tiles(INT4, m, *w, 132, zeros=False) for w in weights] for m in SIZES}
    assert chosen[LEAST_ROWS - 1] == [None] * 4
    assert chosen[64] == [NARROW, NARROW, WIDE, NARROW]
    assert chosen[128] == [NARROW, NARROW, SQUARE, SQUARE]
    assert chosen[256] == [SQUARE, SQUARE, TALL, SQUARE]
    assert chosen[512] == [TALL, SQUARE, TALL, SQUARE]
    assert chosen[1024] == [None, None, TALL, TALL]
    zeros = [select_code_tiles(INT4, 64, *w, 132, zeros=True) for w in weights]
    assert zeros == [NARROW, NARROW, None, NARROW]
    assert select_code_tiles(CodeConstants("int4", 1, 32), 64, 4096, 4096, 132, zeros=False) is None
    assert (
        select_code_tiles(CodeConstants("fp8", 1, 4096), 64, 4096, 4096, 132, zeros=False) is None
    )


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (8192, 28672), (152064, 8192)])
def test_places_fit_32_bits(n: int, k: int) -> None:
    """Any number of rows is multiplied, by another kernel where programs could not count units."""
    for m in (64, 128, 8192, 100_000, 1_000_000, 10_000_000):
        if tiles := select_code_tiles(INT4, m, n, k, 132, zeros=False):
            c = constants_of(tiles)
            assert c.num_units(m, n, k) * c.num_programs(m, n, k, 132) < 2**31
    assert select_code_tiles(INT4, 8192, n, k, 132, zeros=False) or n * k <= SMALL


def test_programs() -> None:
    """Tiles that are fewer than processors have as many programs each."""
    c = constants_of(NARROW)
    assert c.num_programs(64, 28672, 4096, 132) == 132
    assert c.num_programs(64, 6144, 4096, 132) == 96
    assert c.num_programs(64, 4096, 4096, 132) == 128
    assert c.num_programs(64, 64, 1024, 132) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("name", "scale_dtype", "dtype"),
    [
        ("int4", BRAIN, BRAIN),
        ("int4", torch.float32, BRAIN),
        ("int4", HALF, HALF),
        ("int4 zeros of 128", torch.float32, HALF),
        ("int4 channel", torch.float32, BRAIN),
        ("fp8 channel", torch.float32, BRAIN),
        ("fp8 block", torch.float32, BRAIN),
        ("int8", torch.float32, HALF),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 8, 128),
        (17, 200, 256),
        (64, 4096, 4096),
        (65, 136, 640),
        (200, 1000, 1152),
        (1000, 384, 1000),
    ],
)
def test_product(
    name: str, scale_dtype: torch.dtype, dtype: torch.dtype, m: int, n: int, k: int
) -> None:
    """Whole tiles and tiles of several programs; the same bits every time."""
    kind, group_n, group_k, _ = FORMATS[name]
    if group_k is not None and group_n == 1 and k % group_k:
        pytest.skip("groups that the columns do not divide into are refused")
    given = random_codes(name, n, k)
    given = replace(given, scales=given.scales.to(scale_dtype))
    held = QuantisedWeight(given, dtype=dtype)
    weight = CodeArguments(held.words.data, held.scales.data, held.zeros)
    constants = replace(held.constants, packed=True)
    grouped = constants.group_k < k
    split_scales = grouped and weight.scales.dtype != dtype
    x = torch.randn(m, k, device=DEVICE).div(k**0.5).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype) if m == 65 else None
    w = numbers(given)
    expected = functional.linear(x.double(), w, None if bias is None else bias.double())
    by_torch = functional.linear(x, w.to(dtype), bias)
    eight_bits = kind != "int4"
    for tiles in TILES:
        if eight_bits and tiles.rows == 256:
            continue  # too long a stage
        own = replace(tiles, stages=min(tiles.stages, 4)) if eight_bits else tiles
        c = code_tile_constants(own, constants, grouped=grouped, split_scales=split_scales)
        for num_programs in {1, min(3, c.num_units(m, n, k)), c.num_programs(m, n, k, 132)}:
            sums = poisoned(2 * num_programs, c.size, dtype=torch.float32)
            y, again = (poisoned(m, n, dtype=dtype) for _ in range(2))
            for each in (y, again):
                hopper_codes(x, weight, bias, each, sums, held.counters, c, num_programs)
            assert_close(y, expected, by_torch)
            assert torch.equal(y, again)
            assert not held.counters.any()
