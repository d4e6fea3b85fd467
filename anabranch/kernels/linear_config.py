"""When, and with which tiles, few rows are multiplied by a weight with our own kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_ELEMENTS = 1 << 20  # of a weight; a smaller one does not fill the GPU
NARROW = 8192  # outputs up to which two rows are faster than with cuBLAS
WIDE = 6144  # outputs from which long reads are faster than more of them


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A program owns `block_n` outputs and reads their weights `block_k` columns at a time."""

    num_rows: int
    block_n: int
    block_k: int
    num_warps: int
    overlap: bool = True  # weights are read before the kernel ahead has ended


def select_linear(num_rows: int, n: int, k: int, itemsize: int) -> LinearConfig | None:
    """None where torch's product is the better one.

    On an H200, weights of Llama-3.1-8B, microseconds in a graph, cuBLAS / ours: one row qkv 15.2 /
    12.5, o 12.6 / 8.3, gate and up 55.5 / 52.1, down 30.5 / 27.7, logits 241 / 230; two rows qkv
    15.6 / 15.0, o 12.6 / 10.2, gate and up 55.5 / 57.2, down 30.5 / 28.6. From four rows on cuBLAS
    is ahead, also of tiles on the matrix unit (benchmarks/results/linear/h200.json).
    """
    if itemsize != 2 or n * k < MIN_ELEMENTS or k % 8:
        return None
    if num_rows == 1:
        wide = n >= WIDE and k % 2048 == 0
        return LinearConfig(1, 2, 2048, 8) if wide else LinearConfig(1, 4, 1024, 4)
    return LinearConfig(2, 4, 1024, 4) if num_rows == 2 and n <= NARROW else None


def fit_linear(config: LinearConfig, *, hopper: bool) -> LinearConfig:
    """The configuration as a GPU can run it; overlapping came with Hopper."""
    return replace(config, overlap=config.overlap and hopper)


def every_linear_config() -> set[LinearConfig]:
    """All that are ever selected."""
    calls = [(1, 4096), (1, 6144), (2, 4096)]
    return {config for call in calls if (config := select_linear(*call, 4096, 2)) is not None}
