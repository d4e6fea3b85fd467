"""With which tiles Hopper multiplies rows by codes, and how its programs share the work.

A tile is `64 * consumers` outputs by `rows` rows. Its columns are cut into runs; a run of a tile is
a unit of work. Programs take as many units each as others, after each other, whole tiles or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.kernels.layers.quantised_config import CodeConstants

OUTPUTS = 64  # of a consumer
PRODUCER_REGISTERS = 24  # of a thread


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """How the Hopper kernel is tiled."""

    rows: int
    consumers: int
    stages: int

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return OUTPUTS * self.consumers


@dataclass(frozen=True, slots=True)
class CodeTileConstants:
    """What the Hopper kernel is compiled for; never a number of rows."""

    rows: int
    consumers: int
    stages: int
    format: CodeConstants
    grouped: bool  # codes have scales by groups of columns, not only by output
    split_scales: bool  # that are longer than the dtype: a rounded scale and what is left of it
    overlap: bool  # launched before the kernel ahead has ended
    waits_late: bool = True

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return OUTPUTS * self.consumers

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
