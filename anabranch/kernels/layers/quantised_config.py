"""With which tiles rows are multiplied by a quantised weight, and when it is expanded first.

Microseconds beside tiles are of an H200 and of weights as in Llama-3.1-8B, in the order
6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336
(`benchmarks/results/linear/h200-quantised-variants.json`); those of cuBLAS in bfloat16 are 16, 13,
57 and 32 for up to 64 rows, and 22, 18, 91 and 48 for 256.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_ROWS = 256  # of a product over codes; for more, the weight is expanded once
WAVES = 2  # programs a processor that columns are split into
MIN_TILES = 4  # of a program, so that some are on their way while one is multiplied
NUM_COUNTERS = 2048  # of a weight: more than there are tiles where columns are split
RUN = 128  # columns of a tile, at most
SCALED_ROWS = 64  # of products of e4m3 by e4m3 over split columns; for more, torch's is as fast


@dataclass(frozen=True, slots=True)
class CodeConstants:
    """A format as kernels are compiled for it. Groups of outputs and columns share a scale."""

    kind: str  # "fp8", "int8", "int4"
    group_n: int
    group_k: int  # whole rows: a multiple of RUN
    packed: bool = True  # four codes are widened at a time, where there are instructions

    @property
    def parts(self) -> int:
        """Codes of a word of 16 bits: columns that are so many parts of a run apart."""
        return 4 if self.kind == "int4" else 2

    @property
    def step(self) -> int:
        """Columns that are always of one group."""
        return min(self.group_k & -self.group_k, RUN // self.parts)

    @property
    def words(self) -> int:
        """Of a run, and columns that are multiplied at a time: of one group, or of two of 16."""
        return 32 if self.step == 16 else self.step

    @property
    def steps(self) -> int:
        """Of the columns of a part."""
        return self.words // self.step

    @property
    def run(self) -> int:
        """Columns of a tile."""
        return self.words * self.parts

    @property
    def short(self) -> bool:
        """Whether parts of a run have scales of their own."""
        return self.group_k % self.run != 0

    @property
    def has_product(self) -> bool:
        """Whether groups are as long as the matrix unit needs; others are expanded."""
        return self.words >= 16

    @property
    def has_rows(self) -> bool:
        """Whether words of a run fill threads of the matrix unit."""
        return self.words >= 32

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


@dataclass(frozen=True, slots=True)
class RowTiles:
    """For up to so many rows; `wide` where tiles of 128 outputs fill the GPU without splits."""

    num_rows: int
    narrow: QuantisedConfig
    wide: QuantisedConfig


CODE_TILES = {
    4: (  # bits
        # 32 rows: 14.3, 11.3, 40.7, 24.8
        RowTiles(32, QuantisedConfig(32, 128, 8, 4), QuantisedConfig(32, 64, 4, 5)),
        # 64 rows: 18.4, 18.9, 40.6, 28.9; 256: 39.1, 25.1, 158, 65.8
        RowTiles(MOST_ROWS, QuantisedConfig(64, 128, 4, 4), QuantisedConfig(64, 256, 8, 4)),
    ),
    8: (
        # 16 rows of fp8: 12.6, 10.0, 36.4, 21.2; 32: 13.6, 11.4, 36.6, 23.3
        RowTiles(32, QuantisedConfig(32, 128, 8, 4), QuantisedConfig(32, 128, 8, 4)),
        # 64 rows of fp8: 17.5, 16.4, 42.4, 28.8; 256: 41.1, 26.6, 153, 72.6
        RowTiles(MOST_ROWS, QuantisedConfig(64, 128, 8, 4), QuantisedConfig(64, 128, 8, 4)),
    ),
}
# 64 rows: 11.5, 11.2, 36.8, 26.6; torch's 16.1, 15.7, 37.8, 43.5
SCALED_TILES = RowTiles(SCALED_ROWS, QuantisedConfig(64, 64, 4, 8), QuantisedConfig(64, 128, 4, 6))


def code_tiles(constants: CodeConstants) -> tuple[RowTiles, ...]:
    """Those of a format; short groups have products of their own, which take registers."""
    return CODE_TILES[4 if constants.kind == "int4" and not constants.short else 8]


def select_quantised(
    constants: CodeConstants, num_rows: int, n: int, k: int, num_sms: int
) -> QuantisedConfig | None:
    """Tiles for so many rows and a weight [n, k]; None: expand it.

    Few rows are bound by reading codes: columns are split until every processor has work.
    """
    for tiles in code_tiles(constants):
        if num_rows <= tiles.num_rows:
            return _choose(tiles, num_rows, n, -(-k // constants.run), num_sms, WAVES)
    return None


def select_scaled(num_rows: int, n: int, k: int, num_sms: int) -> QuantisedConfig:
    """Tiles for rows and a weight of e4m3 codes."""
    return _choose(SCALED_TILES, num_rows, n, k // RUN, num_sms, 1)


def _choose(
    tiles: RowTiles, num_rows: int, n: int, num_runs: int, num_sms: int, waves: int
) -> QuantisedConfig:
    blocks = -(-n // 128) * -(-num_rows // tiles.narrow.block_m)
    config = tiles.wide if blocks >= num_sms else tiles.narrow
    blocks = -(-n // config.block_n) * -(-num_rows // config.block_m)
    splits = 1 if config is tiles.wide else waves * num_sms // blocks
    return replace(config, splits=max(min(splits, num_runs // MIN_TILES), 1))


def fit_quantised(
    config: QuantisedConfig, constants: CodeConstants, *, shared_bytes: int, hopper: bool
) -> QuantisedConfig:
    """As many stages as shared memory has room for; overlapping came with Hopper."""
    tile = 2 * (config.block_n * constants.words + config.block_m * constants.run)
    stages = max(min(config.num_stages, shared_bytes // tile), 1)
    return replace(config, num_stages=stages, overlap=config.overlap and hopper)


def every_config(*tiles: RowTiles) -> list[QuantisedConfig]:
    """All of tiles for some numbers of rows, with and without split columns."""
    found = [
        config
        for each in tiles
        for config in (each.narrow, replace(each.narrow, splits=4), each.wide)
    ]
    return list(dict.fromkeys(found))


# For up to so many rows of an expert, on average; not measured. Short groups have products of their
# own, for which 128 rows leave no registers.
CODE_EXPERTS = (
    QuantisedConfig(16, 128, 4, 4, overlap=False),
    QuantisedConfig(64, 128, 8, 4, overlap=False),
    QuantisedConfig(128, 128, 8, 3, overlap=False),
)


def select_code_experts(
    constants: CodeConstants, num_rows: int, num_experts: int
) -> QuantisedConfig:
    """Tiles for rows that are spread over experts."""
    tiles = every_code_experts(constants)
    fitting = [config for config in tiles if num_rows <= config.block_m * num_experts]
    return (fitting or tiles[-1:])[0]


def every_code_experts(constants: CodeConstants) -> list[QuantisedConfig]:
    """All that are ever selected for a format."""
    return list(CODE_EXPERTS[:-1] if constants.short else CODE_EXPERTS)


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """A program owns `block_m` rows and `block_n` outputs; its warps share runs of columns."""

    block_m: int  # a multiple of 8
    block_n: int  # a multiple of 16
    runs: int  # of columns at a time, a multiple of `num_warps`
    num_warps: int
    overlap: bool = True


# By how many programs of 16 outputs there are for a processor, and how many rows
ROWS_TILES = {
    8: (  # 8 rows of fp8: 10.4, 7.7, 32.8, 19.2; of int4: 7.4, 5.9, 22.6, 13.5
        (2, RowsConfig(8, 16, 16, 8)),
        (4, RowsConfig(8, 16, 8, 4)),
        (None, RowsConfig(8, 16, 4, 4)),
    ),
    16: (  # of int4: 10.6, 8.1, 32.6, 19.8; fp8's tiles of 32 rows above are as fast or faster
        (2, RowsConfig(16, 16, 16, 8)),
        (4, RowsConfig(16, 16, 8, 4)),
        (None, RowsConfig(16, 32, 4, 4)),
    ),
}


def select_rows(constants: CodeConstants, num_rows: int, n: int, num_sms: int) -> RowsConfig | None:
    """Tiles for up to 8 rows, 16 of int4; None for more, and for groups that are too short."""
    if num_rows > (16 if constants.kind == "int4" else 8) or not constants.has_rows:
        return None
    tiles = ROWS_TILES[8 if num_rows <= 8 else 16]
    config = next(x for most, x in tiles if most is None or n <= 16 * most * num_sms)
    return _of_runs(config, constants)


def every_rows_config(constants: CodeConstants) -> list[RowsConfig]:
    """All that are ever selected for a format."""
    sizes = (8, 16) if constants.kind == "int4" else (8,)
    return [_of_runs(config, constants) for size in sizes for _, config in ROWS_TILES[size]]


def _of_runs(config: RowsConfig, constants: CodeConstants) -> RowsConfig:
    """As many columns at a time where runs are shorter, of groups of 16 half as many."""
    return replace(config, runs=config.runs * RUN // constants.run // constants.steps)
