"""Products over packed weights on the CPU, and what happens to rows between and after them.

A packed weight is described by a table of int64: n, k, whether inputs stay floats, the number of
parts, and for every part its format, its outputs and the address of its bytes (`matrix.h`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import torch
from torch.nn import functional

from anabranch.kernels.cpu.native import native
from anabranch.kernels.cpu.tiles import TILES, num_bytes

FLOAT_PANEL = 32  # outputs that lie side by side in packed floats
F32 = "F32"
FLOAT_INPUTS = 2  # where a table says whether inputs stay floats
LARGE_PAGE = 2 << 20


class WeightPart(NamedTuple):
    """Some outputs of a packed weight, which have one format."""

    format: str  # F32, or one of TILES
    n: int
    data: torch.Tensor  # float32 [panels, k, 32], or uint8, as `pack_tiles` gives them


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] as [panels, k, 32], the last panel filled up with zeros."""
    n, k = weight.shape
    if n % FLOAT_PANEL:
        weight = functional.pad(weight, (0, 0, 0, -n % FLOAT_PANEL))
    panels = weight.view(-1, FLOAT_PANEL, k).transpose(1, 2)
    return _empty_in_large_pages(panels.shape).copy_(panels)


def _empty_in_large_pages(shape: Sequence[int]) -> torch.Tensor:
    """A float32 tensor in pages of 2 MiB as far as it fills them and the system has them.

    A processor reads ahead within a page only: over these, products of SmolLM2-135M take 0.96 to
    1.01 of the time, for 1 to 12 rows.
    """
    size = 4 * prod(shape)
    if size < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=torch.float32, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = mmap.mmap(-1, size + LARGE_PAGE, flags=flags)
    start = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    with suppress(OSError):  # of systems without large pages
        region.madvise(mmap.MADV_HUGEPAGE, start, size // LARGE_PAGE * LARGE_PAGE)
    numbers = torch.frombuffer(region, dtype=torch.float32, count=prod(shape), offset=start)
    return numbers.view(*shape)


def describe(parts: Sequence[WeightPart], k: int, *, float_inputs: bool) -> torch.Tensor:
    """The table of a weight; the parts have to outlive it."""
    table = [sum(part.n for part in parts), k, int(float_inputs), len(parts)]
    for kind, n, data in parts:
        wanted = -(-n // FLOAT_PANEL) * FLOAT_PANEL * k * 4
        if kind != F32:
            wanted = num_bytes(TILES[kind], n, k) if k % TILES[kind].span == 0 else -1
        if data.nbytes != wanted or not data.is_contiguous():
            raise ValueError(f"a {kind} weight [{n}, {k}] cannot have {data.nbytes} bytes")
        table += [0 if kind == F32 else TILES[kind].code, n, data.data_ptr()]
    return torch.tensor(table, dtype=torch.int64)


def packed_rows(table: torch.Tensor, k: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the weight [n, k], float32 [*rows.shape, k]; an IndexError where there is no such."""
    ids = rows.to(torch.int64).contiguous()
    out = torch.empty(*rows.shape, k, dtype=torch.float32)
    bad = native().packed_rows(
        table.data_ptr(), ids.data_ptr(), out.data_ptr(), ids.numel(), torch.get_num_threads()
    )
    if bad:
        raise IndexError(f"rows must be below {int(table[0])}, got {int(ids.flatten()[bad - 1])}")
    return out


def packed_linear(
    x: torch.Tensor,  # [..., k]
    table: torch.Tensor,
    n: int,
    bias: torch.Tensor | None,  # [n]
) -> torch.Tensor:
    """x @ weight.T + bias, [..., n]; a row has the same bits whatever other rows there are."""
    x = x if x.is_contiguous() else x.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    native().packed_linear(
        table.data_ptr(),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None,
        y.data_ptr(),
        x.numel() // x.shape[-1],
        torch.get_num_threads(),
    )
    return y


def silu_gate(joined: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., n], where `joined` [..., 2 n] is gate before up, contiguous."""
    n = joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], n)
    rows = joined.numel() // (2 * n)
    native().silu_gate(joined.data_ptr(), y.data_ptr(), rows, n, torch.get_num_threads())
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x [..., n] over the root of their mean square, times weight [n]."""
    x = x if x.is_contiguous() else x.contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    rows, threads = x.numel() // n, torch.get_num_threads()
    native().rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, epsilon, threads)
    return y


def find_largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the first of the largest numbers of each row is, int64 [rows], and float32 [rows, 2].

    These are that number, in which NaN counts as -inf, and the largest of the row, NaN where one
    is. x is float32 [rows, n], contiguous.
    """
    rows, n = x.shape
    places = torch.empty(rows, dtype=torch.int64)
    peaks = torch.empty(rows, 2, dtype=torch.float32)
    native().find_largest(
        x.data_ptr(), places.data_ptr(), peaks.data_ptr(), rows, n, torch.get_num_threads()
    )
    return places, peaks
