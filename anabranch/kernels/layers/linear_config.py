"""With which tiles a row is multiplied by a weight with our own kernel, and when it is not."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIN_ELEMENTS = 1 << 20  # of a weight; a smaller one does not fill the GPU
WIDE = 6144  # outputs from which long reads are faster than more of them


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """A program owns `block_n` outputs and reads their weights `block_k` columns at a time."""

    block_n: int
    block_k: int
    num_warps: int
    overlap: bool = True  # weights are read before the kernel ahead has ended


def select_linear(num_rows: int, n: int, k: int, itemsize: int) -> LinearConfig | None:
    """None where torch's product is the better one.

    On an H200, weights of Llama-3.1-8B, microseconds in a graph, cuBLAS / ours: qkv 15.2 / 12.5,
    o 12.6 / 8.3, gate and up 55.5 / 52.1, down 30.5 / 27.7, logits 241 / 230. Two rows gain
    on o and down and lose on gate and up; from four rows on cuBLAS is ahead or level, also with
    tiles on the matrix unit (benchmarks/results/linear/h200.json).
    """
    if num_rows != 1 or itemsize != 2 or n * k < MIN_ELEMENTS or k % 8:
        return None
    wide = n >= WIDE and k % 2048 == 0
    return LinearConfig(2, 2048, 8) if wide else LinearConfig(4, 1024, 4)


def fit_linear(config: LinearConfig, *, hopper: bool) -> LinearConfig:
    """The configuration as a GPU can run it; overlapping came with Hopper."""
    return replace(config, overlap=config.overlap and hopper)


def every_linear_config() -> set[LinearConfig]:
    """All that are ever selected."""
    selected = (select_linear(1, n, 4096, 2) for n in (4096, WIDE))
    return {config for config in selected if config is not None}
