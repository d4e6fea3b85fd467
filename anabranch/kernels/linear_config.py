"""How products of few rows with a weight are tiled: a frozen dataclass and its choice."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Either sums of a thread's own products, or tiles of the matrix unit in equal shares.

    Sums give each program `block_n` outputs and all of their weights. Tiles give each of a fixed
    number of workers the same number of weights, and outputs that two workers share are added up
    by the last of them.
    """

    block_m: int  # rows of x at a time
    block_n: int  # rows of the weight, which are outputs
    block_k: int  # columns of both
    num_warps: int
    tiles: bool = False
    num_stages: int = 1  # tiles under way
    workers_per_sm: int = 1  # of tiles
    boxes: bool = False  # tiles are copied by the tensor memory accelerator
    overlap: bool = False  # begins while the kernel ahead ends: programmatic dependent launch
    release_early: bool = False  # tiles let the kernel behind begin at once, not when all are read
    ahead: int = 0  # with overlap, columns fetched into the L2 cache before x may be read
    max_registers: int | None = None


def linear_shared_bytes(config: LinearConfig, itemsize: int) -> int:
    """Shared memory of one program: tiles under way, or else sums that cross warps."""
    if not config.tiles:
        return 4096
    tile = config.block_k * (config.block_m + config.block_n) * itemsize
    sums = config.block_m * config.block_n * 4  # on their way to another layout
    return config.num_stages * tile + sums + 2048


def fit_linear(
    config: LinearConfig, itemsize: int, shared_bytes: int, *, hopper: bool
) -> LinearConfig:
    """The configuration as a GPU can run it; boxes and overlap came with Hopper."""
    while linear_shared_bytes(config, itemsize) > shared_bytes and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    while linear_shared_bytes(config, itemsize) > shared_bytes and config.block_k > 32:
        config = replace(config, block_k=config.block_k // 2)
    programs = max(1, shared_bytes // linear_shared_bytes(config, itemsize))
    return replace(
        config,
        workers_per_sm=min(config.workers_per_sm, programs),
        boxes=config.boxes and hopper,
        overlap=config.overlap and hopper,
    )


def select_linear(num_rows: int, n: int, k: int, itemsize: int) -> LinearConfig | None:
    """Sums for up to four rows, tiles for up to 64; None where torch's product is the better one.

    A weight must be large enough to fill the GPU, and its columns whole tiles.
    """
    if itemsize != 2 or n * k < 1 << 20 or k % 64 or k < 512 or not 1 <= num_rows <= 64:
        return None
    if num_rows <= 4:
        rows = 1 if num_rows == 1 else 2 if num_rows == 2 else 4
        return LinearConfig(rows, 4, 1024, num_warps=4, overlap=True)
    if num_rows <= 16:
        return _tiles(16, 64, 128, 5, workers=2)
    if num_rows <= 32:
        return _tiles(32, 128, 64, 6, workers=1)
    return _tiles(64, 128, 64, 8, workers=1)


def _tiles(rows: int, block_n: int, block_k: int, stages: int, *, workers: int) -> LinearConfig:
    return LinearConfig(
        rows,
        block_n,
        block_k,
        num_warps=4,
        tiles=True,
        num_stages=stages,
        workers_per_sm=workers,
        boxes=True,
        overlap=True,
        ahead=256,
    )


def every_linear_config() -> dict[LinearConfig, int]:
    """Each configuration, and the most rows that select it."""
    selected = ((select_linear(rows, 4096, 4096, 2), rows) for rows in (1, 2, 4, 8, 16, 32, 64))
    return {config: rows for config, rows in selected if config is not None}
