"""With which tiles rows are multiplied by the weights of their experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

HOPPER_BYTES = 227 << 10  # of shared memory
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
