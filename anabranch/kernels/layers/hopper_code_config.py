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


# From and up to so many rows. Below, and for weights that leave a program too few units, the tiles
# of quantised_config.py are as fast; above, expanding the weight once is.
LEAST_ROWS, MOST_ROWS, LEAST_UNITS = 65, 512, 16
TILES = CodeTiles(128, 2, 5)


def select_code_tiles(
    constants: CodeConstants, m: int, n: int, k: int, num_sms: int
) -> CodeTiles | None:
    """Tiles for so many rows and a weight [n, k]; None where other kernels are used."""
    if constants.kind != "int4" or constants.short or not LEAST_ROWS <= m <= MOST_ROWS:
        return None
    num_tiles = -(-m // TILES.rows) * -(-n // (OUTPUTS * TILES.consumers))
    units = num_tiles * -(-k // constants.run)
    return TILES if units >= LEAST_UNITS * share_tiles(num_tiles, num_sms) else None


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
    waits_late: bool = True

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
