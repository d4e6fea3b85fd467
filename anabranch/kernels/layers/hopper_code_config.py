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
FEWEST_ROWS = 17


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """How the Hopper kernel is tiled."""

    rows: int
    consumers: int
    stages: int  # up to 8, as there are named barriers


# For up to so many rows; not measured yet
CODE_TILES = (
    (32, CodeTiles(32, 2, 8)),
    (64, CodeTiles(64, 2, 8)),
    (256, CodeTiles(128, 2, 5)),
    (None, CodeTiles(256, 2, 3)),
)


def select_code_tiles(constants: CodeConstants, num_rows: int) -> CodeTiles | None:
    """Tiles for so many rows; None where other kernels are used."""
    if constants.kind != "int4" or constants.short or num_rows < FEWEST_ROWS:
        return None
    return next(tiles for most, tiles in CODE_TILES if most is None or num_rows <= most)


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
        """One a processor, unless that leaves each too few units."""
        return max(min(num_sms, self.num_units(m, n, k) // MIN_TILES), 1)


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
