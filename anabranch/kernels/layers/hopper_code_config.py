"""With which tiles Hopper multiplies rows by codes, and when.

A tile is `64 * consumers` outputs by `rows` rows; a run of its columns is a unit of work, and
programs have as many units each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache

from anabranch.kernels.layers.quantised_config import MIN_TILES, CodeConstants

OUTPUTS = 64  # of a consumer
PRODUCER_REGISTERS = 24  # of a thread


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """How the Hopper kernel is tiled."""

    rows: int
    consumers: int
    stages: int  # up to 8, as there are named barriers


# Microseconds beside tiles are of an H200, int4 in groups of 128, weights as in Llama-3.1-8B in the
# order 6144 x 4096, 4096 x 4096, 28672 x 4096 and 4096 x 14336, and in brackets those without this
# kernel (`benchmarks/results/linear/h200-int4-tiles.json`, `early`).
LEAST_ROWS = 33  # up to 32, the tiles of quantised_config.py are as fast
SMALL = 1 << 25  # numbers of a weight that is expanded as fast as it is multiplied, from
MANY_ROWS = 768  # rows on
MOST_PRODUCTS = 1 << 45  # of numbers: programs times units stay within 32 bits
NARROW, WIDE, SQUARE, TALL = (
    CodeTiles(64, 2, 8),  # 64 rows: 14.8, 13.1, ., 24.7 (18.5, 18.7, 40.7, 29.6)
    CodeTiles(64, 4, 6),  # 64 rows: ., ., 35.6, .
    CodeTiles(128, 2, 5),  # 256 rows: 26.8, 22.0, ., 53.0 (39.5, 25.4, 160, 66.5)
    CodeTiles(256, 2, 3),  # 256: 104 of the third; 1024: 341, 186 of the last two (399, 199)
)


def select_code_tiles(
    constants: CodeConstants, m: int, n: int, k: int, num_sms: int, *, zeros: bool
) -> CodeTiles | None:
    """Tiles for so many rows and a weight [n, k]; None where other kernels are used."""
    if constants.kind != "int4" or constants.short or m < LEAST_ROWS:
        return None
    if m * n * k > MOST_PRODUCTS:
        return None
    if m <= 64 and n >= 128 * num_sms:
        return None if zeros else WIDE  # four consumers have no registers for them
    if m <= 64:
        return NARROW
    if n * k <= SMALL and (m <= 128 or m > MANY_ROWS):
        return NARROW if m <= 128 else None
    tall = -(-m // TALL.rows) * -(-n // 128)
    return TALL if m > 128 and 3 * tall >= 2 * num_sms else SQUARE


def share_tiles(num_tiles: int, num_sms: int) -> int:
    """Programs, one a processor at most, so that each tile has as many where tiles are few."""
    return num_sms if num_tiles >= num_sms else num_sms // num_tiles * num_tiles


@dataclass(frozen=True, slots=True)
class CodeTileConstants:
    """What the Hopper kernel is compiled for; never a number of rows."""

    rows: int
    consumers: int
    stages: int
    format: CodeConstants
    grouped: bool  # codes have scales by groups of columns, not only by output
    split_scales: bool  # scales are longer than the dtype: each is a 16-bit number and its rest
    overlap: bool  # launched before the kernel ahead has ended

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return OUTPUTS * self.consumers

    @property
    def size(self) -> int:
        """Sums of a tile."""
        return self.outputs * self.rows

    @property
    def threads(self) -> int:
        """That meet where a stage becomes free: consumers, and the producer."""
        return 128 * self.consumers + 32

    @property
    def stage_bytes(self) -> int:
        """Codes of the outputs, and a run of the rows."""
        return 2 * (self.outputs * self.format.words + self.rows * self.format.run)

    @property
    def registers(self) -> int:
        """Of a thread on average, the producer's warpgroup included."""
        return 65536 // (128 * (self.consumers + 1)) // 8 * 8

    @property
    def consumer_registers(self) -> int:
        """Of a thread: what the producer leaves."""
        rest = self.registers * (self.consumers + 1) - PRODUCER_REGISTERS
        return rest // self.consumers // 8 * 8

    def num_units(self, m: int, n: int, k: int) -> int:
        """Runs of all tiles."""
        return -(-m // self.rows) * -(-n // self.outputs) * -(-k // self.format.run)

    def num_programs(self, m: int, n: int, k: int, num_sms: int) -> int:
        """As tiles are shared, but with so many units each that are worth joining."""
        num_tiles = -(-m // self.rows) * -(-n // self.outputs)
        units = self.num_units(m, n, k)
        return max(min(share_tiles(num_tiles, num_sms), units // MIN_TILES), 1)


@cache
def code_tile_constants(
    tiles: CodeTiles,
    constants: CodeConstants,
    *,
    grouped: bool,
    split_scales: bool,
    overlap: bool = True,
) -> CodeTileConstants:
    """Join tiles with a format."""
    given = {"grouped": grouped, "split_scales": split_scales, "overlap": overlap}
    return CodeTileConstants(**asdict(tiles), format=constants, **given)
