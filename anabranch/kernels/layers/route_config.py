"""With which tiles tokens are multiplied by the weight of a router."""

from __future__ import annotations

from dataclasses import dataclass, replace

BLOCK_TOKENS = 16  # of a program with few
FEW_TOKENS = 256  # up to which reading the weight counts, not the product
NUM_PROGRAMS = 128  # about as many as a GPU has processors
MOST_EXPERTS = 128  # of a program with many tokens


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """A program owns `block_m` tokens, `block_e` experts and a part of the columns.

    The columns are divided into `splits` parts, each of whole tiles of `block_k`.
    """

    block_m: int
    block_e: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    overlap: bool = False  # weights are read before the kernel ahead has ended


def select_route(num_tokens: int, num_experts: int, k: int) -> RouteConfig:
    """Tiles for a power of two of experts.

    Few tokens: every program reads one tile of the weight at once. Many: as few programs as fill
    the GPU, since each of them writes sums that the last one reads again. H200, V2-Lite, us: one
    token 3.6 with 16 experts a program and two warps, 3.9 with 64 and four; 64 tokens 8.7 and 4.3.
    V3, 64 tokens: 17.4 with 32 experts, 14.2 with 64.
    """
    wide = num_experts > 128
    if num_tokens <= FEW_TOKENS:
        block_k = 256 if k <= 4096 else 512
        splits = -(-k // block_k)
        if num_tokens <= BLOCK_TOKENS:
            block_e, num_warps = (32, 8) if wide else (16, 2)
        else:
            block_e, num_warps = 64, 8 if wide else 4
        block_e = min(block_e, num_experts)
        return RouteConfig(BLOCK_TOKENS, block_e, block_k, splits, num_warps, 1, overlap=True)
    blocks = -(-num_tokens // 64)
    splits = max(1, min(8, NUM_PROGRAMS // blocks, k // 256))
    return RouteConfig(64, min(num_experts, MOST_EXPERTS), 64, splits, 8 if wide else 4, 3)


def fit_route(
    config: RouteConfig, *, itemsize: int, shared_bytes: int, hopper: bool
) -> RouteConfig:
    """The configuration as a GPU can run it: overlapping came with Hopper."""
    config = replace(config, overlap=config.overlap and hopper)
    while shared_bytes_of(config, itemsize) > shared_bytes and config.num_stages > 1:
        config = replace(config, num_stages=config.num_stages - 1)
    while shared_bytes_of(config, itemsize) > shared_bytes and config.block_k > 16:
        config = replace(config, block_k=config.block_k // 2)
    return config


def shared_bytes_of(config: RouteConfig, itemsize: int) -> int:
    tile = (config.block_m + config.block_e) * config.block_k
    return tile * itemsize * config.num_stages


def every_route_case() -> list[tuple[int, int, int]]:
    """Numbers of tokens, experts and columns that cover what is ever selected."""
    return [(1, 64, 2048), (64, 256, 7168), (2048, 64, 2048)]
