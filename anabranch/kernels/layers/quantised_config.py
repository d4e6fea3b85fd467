"""With which tiles rows are multiplied by a quantised weight, and when it is expanded first."""

from __future__ import annotations

from dataclasses import dataclass, replace

FEW_ROWS = 16  # the narrowest tile of the matrix unit
MOST_ROWS = 256  # of a product over codes; for more, the weight is expanded once
WAVES = 3  # programs a processor that few rows are spread over
MIN_TILES = 4  # of a program, so that some are on their way while one is multiplied


NUM_COUNTERS = 2048  # of a weight: more than there are tiles where columns are split
RUN = 128  # columns of a tile, at most


@dataclass(frozen=True, slots=True)
class CodeConstants:
    """A format as kernels are compiled for it. Groups of outputs and columns share a scale."""

    kind: str  # "fp8", "int8", "int4"
    group_n: int
    group_k: int  # whole rows: a multiple of RUN
    packed: bool = True  # four codes are widened at a time, where there are instructions

    @property
    def run(self) -> int:
        """Columns of a tile, all of one group."""
        return min(self.group_k, RUN)

    @property
    def parts(self) -> int:
        """Codes of a word of 16 bits: columns that are so many parts of a run apart."""
        return 4 if self.kind == "int4" else 2

    @property
    def words(self) -> int:
        """Of a run, and columns that are multiplied at a time."""
        return self.run // self.parts

    @property
    def has_product(self) -> bool:
        """Whether groups are as long as the matrix unit needs; others are expanded."""
        return self.words >= 16 and self.run & (self.run - 1) == 0 and self.group_k % self.run == 0

    @property
    def zero(self) -> float:
        """The code of 0, where a weight has no zeros of its own."""
        return 8.0 if self.kind == "int4" else 0.0


@dataclass(frozen=True, slots=True)
class QuantisedConfig:
    """A program owns `block_m` rows and `block_n` outputs, and a run of columns at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the columns of a tile
    overlap: bool = True  # launched before the kernel ahead has ended


def select_quantised(num_rows: int, n: int, num_runs: int, num_sms: int) -> QuantisedConfig | None:
    """Tiles for so many rows, `n` outputs and runs of columns; None: expand the weight.

    Few rows are bound by reading codes: columns are split until every processor has work.
    """
    if num_rows > MOST_ROWS:
        return None
    if num_rows <= FEW_ROWS:
        config = QuantisedConfig(16, 64, 4, 5)
    elif num_rows <= 32:
        config = QuantisedConfig(32, 64, 4, 4)
    else:
        config = QuantisedConfig(64, 128, 8, 4)
    tiles = -(-n // config.block_n) * -(-num_rows // config.block_m)
    splits = min(WAVES * num_sms // tiles, num_runs // MIN_TILES)
    return replace(config, splits=max(splits, 1))


def fit_quantised(
    config: QuantisedConfig, constants: CodeConstants, *, shared_bytes: int, hopper: bool
) -> QuantisedConfig:
    """As many stages as shared memory has room for; overlapping came with Hopper."""
    tile = 2 * (config.block_n * constants.words + config.block_m * constants.run)
    stages = max(min(config.num_stages, shared_bytes // tile), 1)
    return replace(config, num_stages=stages, overlap=config.overlap and hopper)


def every_quantised_config() -> list[QuantisedConfig]:
    """All tiles that are ever selected, with and without split columns."""
    sizes = [(rows, n) for rows in (FEW_ROWS, 32, MOST_ROWS) for n in (512, 1 << 20)]
    selected = (select_quantised(*size, 32, 132) for size in sizes)
    return [config for config in selected if config is not None]
