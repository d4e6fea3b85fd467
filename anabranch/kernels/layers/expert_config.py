"""With which tiles rows are multiplied by the weights of their experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache

from anabranch.kernels.config import power_of_two

BLOCK_M = 128  # rows of a tile of the Hopper kernel: two consumers of 64
HOPPER_BYTES = 227 << 10  # of shared memory
# Rows of an expert, on average, from which the Hopper kernel is used. 64 experts of 2048 x 1408,
# top 6, ms there and in Triton: 64 tokens 0.286 and 0.264, 256 0.289 and 0.299, 2048 0.49 and 0.75
HOPPER_ROWS = 24
FEW_ROWS, SOME_ROWS = 16, 64  # of an expert, on average, up to which tiles are that high


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A program owns `block_m` rows of one expert and `block_n` outputs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Tiles of the rows and of two weights, gate and up, for every stage."""
        tile = (self.block_m + 2 * self.block_n) * self.block_k
        return tile * itemsize * self.num_stages


def select_experts(num_rows: int, num_experts: int) -> ExpertConfig:
    """Tiles for rows that are spread over experts.

    Few rows are bound by reading weights: narrow tiles make more programs of them, and long ones
    keep more bytes in flight.
    """
    average = num_rows / num_experts
    if average <= 0.5:
        return ExpertConfig(16, 32, 128, 4, 4)
    if average <= FEW_ROWS:
        return ExpertConfig(16, 64, 128, 4, 3)
    if average <= SOME_ROWS:
        return ExpertConfig(64, 64, 64, 4, 3)
    return ExpertConfig(128, 128, 64, 8, 3)


def fit_experts(config: ExpertConfig, *, itemsize: int, shared_bytes: int) -> ExpertConfig:
    """The configuration with as many stages, then as long tiles, as shared memory has room for.

    Before Hopper, two accumulators of 128 x 128 do not fit into registers.
    """
    if shared_bytes < HOPPER_BYTES and config.block_m * config.block_n > 128 * 64:
        config = replace(config, block_n=64)
    while config.shared_bytes(itemsize) > shared_bytes and config.num_stages > 2:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.shared_bytes(itemsize) > shared_bytes and config.block_k > 16:
        config = replace(config, block_k=config.block_k // 2)
    return config


def every_expert_config() -> set[ExpertConfig]:
    """All that are ever selected."""
    return {select_experts(rows, 64) for rows in (6, 384, 2048, 49152)}


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How the Hopper kernel is tiled: 128 rows, `block_n` rows of weights."""

    block_n: int = 256
    block_k: int = 64
    stages: int = 4


def select_expert_tiles(num_rows: int, num_experts: int) -> ExpertTiles | None:
    """Tiles of the Hopper kernel; None where rows are so few that the Triton kernel is as fast."""
    return ExpertTiles() if num_rows >= HOPPER_ROWS * num_experts else None


@dataclass(frozen=True, slots=True)
class ExpertConstants:
    """What the Hopper kernel is compiled for; never a number of rows."""

    block_n: int
    block_k: int
    stages: int
    experts: int  # a power of two
    top_k: int
    gated: bool
    even: bool  # whether block_k divides the columns

    @property
    def gathers(self) -> bool:
        """Rows of the first product are gathered by token; those of the second lie in order."""
        return self.gated

    @property
    def columns(self) -> int:
        """Outputs of a tile, and rows of a box of weights: a gate and an up make one output."""
        return self.block_n // 2 if self.gated else self.block_n

    @property
    def box_bytes(self) -> int:
        """That boxes bring for a stage: weights, and rows that are not gathered."""
        rows = self.block_n + (0 if self.gathers else BLOCK_M)
        return rows * self.block_k * 2

    @property
    def producer_warps(self) -> int:
        """One thread copies boxes; gathering takes all of a warpgroup."""
        return 4 if self.gathers else 1

    @property
    def threads(self) -> int:
        """That meet where a stage becomes free."""
        return 256 + 32 * self.producer_warps

    @property
    def arrivals(self) -> int:
        """That complete a stage: the announcement of boxes, and each gathering thread."""
        return 129 if self.gathers else 1


@cache
def expert_constants(
    tiles: ExpertTiles, *, num_experts: int, top_k: int, gated: bool, even: bool
) -> ExpertConstants:
    """Join tiles with the shapes of a call."""
    experts = max(power_of_two(num_experts), 32)
    return ExpertConstants(**asdict(tiles), experts=experts, top_k=top_k, gated=gated, even=even)
