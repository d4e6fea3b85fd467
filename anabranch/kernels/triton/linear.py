"""Products of few rows with a weight: bound by reading the weight, so by bytes under way.

Sums: a program owns a few outputs and reads their weights straight into registers. Tiles: workers
take equal contiguous shares of all tiles, so that none ends late; outputs whose columns were
shared are added up, in the order of the columns, by the last worker that arrives at them.
With OVERLAP weights are on their way before the kernel ahead has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from anabranch.kernels.linear_config import LinearConfig, every_linear_config, fit_linear
from anabranch.kernels.triton.merge_tree import arrive

MAX_TILES = 1 << 16


def linear(
    x: torch.Tensor,  # [num_rows, k], contiguous rows
    w: torch.Tensor,  # [n, k], contiguous rows
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [num_rows, n]
    config: LinearConfig,
    num_sms: int,
) -> None:
    """Write x @ w.T + bias into `y`."""
    launch = _linear_tiles if config.tiles else _linear_sums
    launch(x, w, bias, y, config, num_sms)


def _options(config: LinearConfig) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": config.num_warps}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    if config.overlap:
        options["launch_pdl"] = True
    return options


def _linear_sums(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearConfig,
    _: int,
) -> None:
    n, k = w.shape
    grid = (triton.cdiv(n, config.block_n), triton.cdiv(x.shape[0], config.block_m))
    linear_sums_kernel[grid](
        x,
        w,
        bias,
        y,
        (x.stride(0), w.stride(0), y.stride(0)),
        x.shape[0],
        n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(k)),
        OVERLAP=config.overlap,
        AHEAD=config.ahead if config.ahead <= k else 0,
        THREADS=32 * config.num_warps,
        **_options(config),
    )


def _linear_tiles(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    config: LinearConfig,
    num_sms: int,
) -> None:
    n, k = w.shape
    blocks = triton.cdiv(x.shape[0], config.block_m)
    tiles = triton.cdiv(n, config.block_n)
    steps = triton.cdiv(k, config.block_k)
    workers = min(num_sms * config.workers_per_sm, tiles * steps)
    assert tiles * blocks <= MAX_TILES
    parts = torch.empty(
        blocks, 2 * workers, config.block_n, config.block_m, dtype=torch.float32, device=x.device
    )
    linear_tiles_kernel[workers, blocks](
        x,
        w,
        _boxes(x, config.block_m, config.block_k) if config.boxes else None,
        _boxes(w, config.block_n, config.block_k) if config.boxes else None,
        bias,
        y,
        parts,
        arrivals(x.device),
        (x.stride(0), w.stride(0), y.stride(0)),
        x.shape[0],
        n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WORKERS=workers,
        STAGES=config.num_stages,
        BATCH=max(1, min(4, 4096 // (config.block_m * config.block_n))),
        OVERLAP=config.overlap,
        RELEASE_EARLY=config.release_early,
        AHEAD=config.ahead if config.ahead <= k else 0,
        THREADS=32 * config.num_warps,
        **_options(config),
    )


def _boxes(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@lru_cache
def arrivals(device: torch.device) -> torch.Tensor:
    """Counters of a device, zero between launches: they follow each other in one stream."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on meta tensors that cover the configurations."""
    hopper = shared_bytes >= 227 * 1024

    def launch(config: LinearConfig, rows: int, dtype: torch.dtype, *, biased: bool) -> object:
        config = fit_linear(config, 2, shared_bytes, hopper=hopper)
        x, w, y = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in ((rows, 4096), (6144, 4096), (rows, 6144))
        )
        return linear(x, w, y[0] if biased else None, y, config, 132)

    for config, rows in every_linear_config().items():
        kind = "tiles" if config.tiles else "sums"
        name = f"{kind} {config.block_m} x {config.block_n} x {config.block_k}"
        yield f"{name} bfloat16", partial(launch, config, rows, torch.bfloat16, biased=False)
        yield f"{name} float16 bias", partial(launch, config, rows, torch.float16, biased=True)


@triton.jit
def fetch_ahead(
    w_ptr, stride, first_row, first, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Bring ROWS x COLUMNS of the weight into the L2 cache, each thread a piece."""
    PIECES: tl.constexpr = THREADS // ROWS if THREADS > ROWS else 1
    WIDTH: tl.constexpr = COLUMNS // PIECES
    BYTES: tl.constexpr = WIDTH * w_ptr.dtype.element_ty.primitive_bitwidth // 8
    pieces = tl.arange(0, ROWS * PIECES)
    rows = tl.minimum(first_row + pieces // PIECES, n - 1).to(tl.int64)
    columns = tl.minimum(first, K - COLUMNS) + pieces % PIECES * WIDTH
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,n",
        [w_ptr + rows * stride + columns, BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_weights(w_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns [first, first + BLOCK_K) of some rows, zero behind the last."""
    if K % BLOCK_K == 0:
        return tl.load(w_ptrs + first, eviction_policy="evict_first")
    else:
        mask = (first + dims < K)[None, :]
        return tl.load(w_ptrs + first, mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_x(x_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of one row of x, zero behind the last; every program reads them."""
    if K % BLOCK_K == 0:
        return tl.load(x_ptrs + first, eviction_policy="evict_last")
    else:
        return tl.load(x_ptrs + first, first + dims < K, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["num_rows", "n"])
def linear_sums_kernel(
    x_ptr,  # [num_rows, K]
    w_ptr,  # [n, K]
    bias_ptr,  # [n] or None
    y_ptr,  # [num_rows, n]
    strides,  # of the rows of x, w and y
    num_rows,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
    VECTOR: tl.constexpr = 8,  # products that a thread adds up before they meet others
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    w_rows = tl.minimum(columns, n - 1).to(tl.int64) * strides[1]
    w_ptrs = w_ptr + w_rows[:, None] + dims[None, :]
    w = load_weights(w_ptrs, 0, dims, K, BLOCK_K)
    if OVERLAP:
        if AHEAD > 0:
            first_column = tl.program_id(0) * BLOCK_N
            fetch_ahead(w_ptr, strides[1], first_column, BLOCK_K, n, K, BLOCK_N, AHEAD, THREADS)
        gdc_launch_dependents()
        gdc_wait()
    first_row = tl.program_id(1) * BLOCK_M
    x_ptrs, sums = (), ()
    for i in tl.static_range(BLOCK_M):
        row = tl.minimum(first_row + i, num_rows - 1).to(tl.int64)
        x_ptrs = x_ptrs + (x_ptr + row * strides[0] + dims,)  # noqa: RUF005 (no unpacking)
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)  # noqa: RUF005

    for first in range(0, K, BLOCK_K):
        following = w
        if first + BLOCK_K < K:
            following = load_weights(w_ptrs, first + BLOCK_K, dims, K, BLOCK_K)
        wide, added = w.to(tl.float32), ()
        for i in tl.static_range(BLOCK_M):
            x = load_x(x_ptrs[i], first, dims, K, BLOCK_K).to(tl.float32)
            products = tl.reshape(wide * x[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
            added = added + (sums[i] + tl.sum(products, 2),)  # noqa: RUF005
        w, sums = following, added

    for i in tl.static_range(BLOCK_M):
        y = tl.sum(sums[i], 1)
        mask = (columns < n) & (first_row + i < num_rows)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask, other=0.0).to(tl.float32)
        offsets = (first_row + i).to(tl.int64) * strides[2] + columns
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def load_tile(
    box, ptr, stride, first_row, first, num_rows,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS of a matrix, zero behind its last column; rows behind the last are unused."""
    if box is not None:
        return box.load([first_row, first])
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
    dims = first + tl.arange(0, COLUMNS)
    ptrs = ptr + rows[:, None] * stride + dims[None, :]
    if K % COLUMNS == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, (dims < K)[None, :], other=0.0)


@triton.jit
def write_tile(y_ptr, stride, bias_ptr, acc, columns, rows, num_rows, n):
    """Store a tile [columns, rows] of sums transposed."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, columns < n, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < n)[None, :]
    tl.store(y_ptr + offsets, tl.trans(acc).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def share_start(worker, num_units, WORKERS: tl.constexpr):
    """Where a worker's share begins, and the one before it ends."""
    return (num_units * worker // WORKERS).to(tl.int32)


@triton.jit
def worker_of(unit, num_units, WORKERS: tl.constexpr):
    """Whose share holds a unit."""
    return ((tl.cast(unit + 1, tl.int64) * WORKERS - 1) // num_units).to(tl.int32)


@triton.jit
def is_whole(tile, start, stop, STEPS: tl.constexpr):
    """Whether all columns of a tile are in the share [start, stop)."""
    return (tile * STEPS >= start) & ((tile + 1) * STEPS <= stop)


@triton.jit
def part_slots(workers, tile, num_units, STEPS: tl.constexpr, WORKERS: tl.constexpr):
    """Where workers leave their part of a tile: it is the first of their share, or the last."""
    first_tile = share_start(workers, num_units, WORKERS) // STEPS
    return 2 * workers + (first_tile != tile).to(tl.int32)


@triton.jit
def add_parts(
    parts_ptr, first, last, tile, num_units,
    STEPS: tl.constexpr, WORKERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """The sum of a tile's parts, in the order of their columns, BATCH of them under way."""
    within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(first, last + 1, BATCH):
        parts = ()
        for i in tl.static_range(BATCH):
            slot = part_slots(begin + i, tile, num_units, STEPS, WORKERS)
            mask = (within >= 0) & (begin + i <= last)
            part = tl.load(parts_ptr + slot * (BLOCK_N * BLOCK_M) + within, mask, other=0.0)
            parts = parts + (part,)  # noqa: RUF005 (no unpacking)
        for i in tl.static_range(BATCH):
            total += parts[i]
    return total


@triton.jit(do_not_specialize=["num_rows", "n"])
def linear_tiles_kernel(
    x_ptr,  # [num_rows, K]
    w_ptr,  # [n, K]
    x_box,  # the same as boxes, or None
    w_box,
    bias_ptr,  # [n] or None
    y_ptr,  # [num_rows, n]
    parts_ptr,  # [blocks of rows, 2 * WORKERS, BLOCK_N, BLOCK_M]
    arrivals_ptr,  # [blocks of rows, tiles of w], all zero
    strides,  # of the rows of x, w and y
    num_rows,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORKERS: tl.constexpr,
    STAGES: tl.constexpr,
    BATCH: tl.constexpr,  # parts that are added at a time
    OVERLAP: tl.constexpr,
    RELEASE_EARLY: tl.constexpr,  # the kernel behind begins at once, not when tiles are read
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    worker, block = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.cdiv(n, BLOCK_N)
    num_units = num_tiles.to(tl.int64) * STEPS
    start = share_start(worker, num_units, WORKERS)
    stop = share_start(worker + 1, num_units, WORKERS)
    if OVERLAP:
        if AHEAD > 0:
            tile, step = start // STEPS, start % STEPS
            fetch_ahead(
                w_ptr, strides[1], tile * BLOCK_N, step * BLOCK_K, n, K, BLOCK_N, AHEAD, THREADS
            )
        if RELEASE_EARLY:
            gdc_launch_dependents()
        gdc_wait()

    parts_ptr += block.to(tl.int64) * (2 * WORKERS * BLOCK_N * BLOCK_M)
    arrivals_ptr += block * num_tiles
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for unit in tl.range(start, stop, num_stages=STAGES):
        tile, step = unit // STEPS, unit % STEPS
        w = load_tile(
            w_box, w_ptr, strides[1], tile * BLOCK_N, step * BLOCK_K, n, K, BLOCK_N, BLOCK_K
        )
        x = load_tile(
            x_box, x_ptr, strides[0], block * BLOCK_M, step * BLOCK_K, num_rows, K, BLOCK_M, BLOCK_K
        )
        acc = tl.dot(w, tl.trans(x), acc)
        if (step == STEPS - 1) | (unit == stop - 1):
            columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if is_whole(tile, start, stop, STEPS):
                write_tile(y_ptr, strides[2], bias_ptr, acc, columns, rows, num_rows, n)
            else:
                slot = part_slots(worker, tile, num_units, STEPS, WORKERS)
                tl.store(parts_ptr + slot * (BLOCK_N * BLOCK_M) + within, acc)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)

    if OVERLAP and not RELEASE_EARLY:
        gdc_launch_dependents()
    # Only here: a loop with a barrier or another loop in it would not be pipelined.
    first_tile, last_tile = start // STEPS, (stop - 1) // STEPS
    for tile in range(first_tile, last_tile + 1, tl.maximum(last_tile - first_tile, 1)):
        if not is_whole(tile, start, stop, STEPS):
            first = worker_of(tile * STEPS, num_units, WORKERS)
            last = worker_of((tile + 1) * STEPS - 1, num_units, WORKERS)
            if arrive(arrivals_ptr + tile, last - first + 1):
                total = add_parts(
                    parts_ptr, first, last, tile, num_units,
                    STEPS, WORKERS, BLOCK_M, BLOCK_N, BATCH,
                )  # fmt: skip
                columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                write_tile(y_ptr, strides[2], bias_ptr, total, columns, rows, num_rows, n)
