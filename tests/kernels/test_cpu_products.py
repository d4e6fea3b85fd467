"""Products with weights in GGUF's formats against gguf's numbers in float64."""

from __future__ import annotations

import errno
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerance import assert_close

pytest.importorskip("gguf")

from gguf_blocks import random_part, random_rows

from anabranch.kernels.cpu import linear as linear_module
from anabranch.kernels.cpu.linear import (
    F32,
    LARGE_PAGE,
    WeightPart,
    describe,
    find_largest,
    pack,
    packed_linear,
    packed_rows,
)
from anabranch.kernels.cpu.native import FOLDER, OPTIONS, load_kernels, native
from anabranch.kernels.cpu.tiles import TILES, pack_tiles

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")
CODES = [name for name, kind in TILES.items() if kind.read is not None]
SHAPES = [(1, 1), (16, 2), (37, 3)]  # outputs, blocks of columns
ROWS = [0, 1, 2, 3, 5, 8, 9, 31, 197, 300]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products by one thread: teams that share cores with others wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def inputs(rows: int, k: int) -> torch.Tensor:
    """Numbers that 8 bits hold exactly: multiples of a scale, of which the largest is 127."""
    codes = torch.randint(-127, 128, (rows, k // 32, 32)).float()
    codes[..., 5] = 127
    codes[:, ::3, 5] = -127
    return (codes * torch.rand(rows, k // 32, 1)).view(rows, k)


def check(part: WeightPart, values: torch.Tensor, *, float_inputs: bool) -> None:
    """Many rows by their error; fewer have the same bits."""
    n, k = values.shape
    x = torch.randn(ROWS[-1], k) if float_inputs else inputs(ROWS[-1], k)
    bias = torch.randn(n)
    table = describe([part], k, float_inputs=float_inputs)
    y = packed_linear(x, table, n, bias)
    exact = x.double() @ values.double().T + bias.double()
    assert_close(y, exact, x @ values.T + bias)
    for rows in ROWS:
        first = ROWS[-1] - rows
        assert torch.equal(packed_linear(x[first:], table, n, bias), y[first:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TILES)
def test_products(name: str, shape: tuple[int, int]) -> None:
    n, k = shape[0], shape[1] * TILES[name].span
    part, values = random_part(name, n, k)
    for float_inputs in (True, name not in CODES):
        check(part, values, float_inputs=float_inputs)


@pytest.mark.parametrize("name", TILES)
def test_rows(name: str) -> None:
    part, values = random_part(name, 37, 2 * TILES[name].span)
    ids = torch.tensor([[36, 0, 16], [15, 17, 36]])
    table = describe([part], values.shape[1], float_inputs=False)
    rows = packed_rows(table, values.shape[1], ids)
    assert_close(rows, values.double()[ids], values[ids])
    for wrong in (37, -1):
        with pytest.raises(IndexError, match=f"rows must be below 37, got {wrong}"):
            packed_rows(table, values.shape[1], torch.tensor([3, wrong]))


def test_parts_of_several_formats() -> None:
    floats = torch.randn(40, 512)
    pairs = [random_part(name, n, 512, n) for name, n in (("Q4_K", 20), ("Q6_K", 5), ("F16", 16))]
    pairs.insert(1, (WeightPart(F32, 40, pack(floats)), floats))
    values = torch.cat([each for _, each in pairs])
    x = inputs(7, 512)
    table = describe([part for part, _ in pairs], 512, float_inputs=False)
    y = packed_linear(x, table, len(values), None)
    assert_close(y, x.double() @ values.double().T, x @ values.T)
    ids = torch.arange(len(values))
    assert torch.equal(packed_rows(table, 512, ids)[20:60], floats)


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_threads_share_the_outputs(name: str) -> None:
    part, values = random_part(name, 83, 64)
    table, x = describe([part], 64, float_inputs=False), torch.randn(40, 64)
    alone = packed_linear(x, table, 83, None)
    torch.set_num_threads(3)
    assert torch.equal(packed_linear(x, table, 83, None), alone)
    assert torch.equal(packed_linear(x[:1], table, 83, None), alone[:1])
    del values


def test_a_weight_that_fills_large_pages() -> None:
    n, k = 1050, 520
    values = torch.randn(n, k)
    part = WeightPart(F32, n, pack(values))
    assert part.data.nbytes > LARGE_PAGE
    check(part, values, float_inputs=True)
    assert torch.equal(deepcopy(part.data), part.data)


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Region(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Region)
    values = torch.randn(1050, 520)
    check(WeightPart(F32, 1050, pack(values)), values, float_inputs=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_kernels_write_float32_whatever_the_default(dtype: torch.dtype) -> None:
    before, x = torch.get_default_dtype(), torch.randn(5, 64, dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        part = WeightPart(F32, 5, pack(x))
        assert part.data.dtype == find_largest(x)[1].dtype == torch.float32
        table = describe([part], 64, float_inputs=True)
        assert torch.equal(packed_rows(table, 64, torch.arange(5)), x)
    finally:
        torch.set_default_dtype(before)


def test_inputs_that_are_no_numbers_make_outputs_that_are_none() -> None:
    part, values = random_part("Q4_1", 20, 64)
    table = describe([part], 64, float_inputs=False)
    x = torch.randn(4, 64)
    x[0, 3], x[1, 40], x[2] = torch.nan, -torch.inf, 0
    y = packed_linear(x, table, 20, None)
    assert y[:2].isnan().all() and not y[2].any() and y[3].isfinite().all()
    del values


def test_sizes_that_do_not_fit_are_refused() -> None:
    rows, _ = random_rows("Q4_K", 4, 512)
    with pytest.raises(ValueError, match="rows of 256 columns cannot have 288 bytes"):
        pack_tiles(rows, TILES["Q4_K"], 256)
    with pytest.raises(ValueError, match="rows of 500 columns"):
        pack_tiles(rows, TILES["Q4_K"], 500)
    part, _ = random_part("Q8_0", 16, 64)
    for n, k in ((16, 32), (17, 64), (16, 65)):
        with pytest.raises(ValueError, match=rf"a Q8_0 weight \[{n}, {k}\] cannot have 1088 bytes"):
            describe([part._replace(n=n)], k, float_inputs=False)


def test_a_large_weight_is_packed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = random_rows("Q5_K", 70, 256)
    whole = pack_tiles(rows, TILES["Q5_K"], 256)
    monkeypatch.setattr("anabranch.kernels.cpu.tiles.ROWS_AT_ONCE", 32)
    assert np.array_equal(pack_tiles(rows, TILES["Q5_K"], 256), whole)


def runnable() -> list[str]:
    """Targets of this machine with other instructions than its own: AVX2, and none of ours."""
    path = Path("/proc/cpuinfo")
    flags = path.read_text().split() if path.exists() else []
    return [name for name, flag in (("x86-64-v3", "avx2"), ("x86-64", "sse2")) if flag in flags]


@pytest.mark.parametrize("target", runnable())
def test_other_instructions(target: str, monkeypatch: Any) -> None:
    compiler = shutil.which("cc")
    assert compiler is not None
    library = load_kernels(compiler, target)
    monkeypatch.setattr(linear_module, "native", lambda: library)
    for name in TILES:
        part, values = random_part(name, 37, 2 * TILES[name].span)
        for float_inputs in (True, name not in CODES):
            check(part, values, float_inputs=float_inputs)


@pytest.mark.parametrize(
    ("compiler", "target"),
    [
        ("x86_64-linux-gnu-gcc", "alderlake"),  # AVX-VNNI
        ("aarch64-linux-gnu-gcc", "armv8-a"),
        ("aarch64-linux-gnu-gcc", "armv8.2-a+dotprod"),
        ("aarch64-linux-gnu-gcc", "armv8.2-a+i8mm"),
    ],
)
def test_instructions_that_are_not_here_compile(compiler: str, target: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for source in (FOLDER / "codes.c", FOLDER / "expanded.c"):
        options = [*OPTIONS, "-O1", f"-march={target}", "-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
        command = [compiler, *options, "-c", str(source), "-o", str(tmp_path / "object.o")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
