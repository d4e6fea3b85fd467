"""What the Hopper kernel for latent keys is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anabranch.kernels.config import AttendConfig
from anabranch.kernels.constants import AttendConstants
from anabranch.kernels.hopper_config import prefetch_assembly
from anabranch.kernels.programs import HeadShape, PartKinds, StoreTypes, attend_program
from anabranch.keys import PLAIN

LATENT_DIMS = (576, 512)  # columns of a row, and of its value: two halves and 64 rotary columns
BLOCK_ROWS = 64  # query rows (token, head) of a block
HALF_KEYS = 64  # keys that one consumer scores
TILE_KEYS = 2 * HALF_KEYS  # keys of a tile: both consumers' halves


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """How work is cut and registers are shared."""

    # tiles of a worker, at least. 1 x 8192, 128 heads, H200, us: 1 24.5, 2 22.4, 3 24.2, 4 26.8
    least_share: int = 2
    # percent that shares may grow so that each lies in one block. 16 x 8192: 80.1 us, 88.7 at 0
    aligned_growth: int = 12
    merge_batch: int = 8  # parts loaded at a time, where there are many
    # times that a worker at its end looks whether all parts are there. 1 x 8192: 26.8 us, 58.1 at 0
    merge_patience: int = 64
    block_price: int = 1  # beginning a block takes as long as this many tiles,
    # and leaving two parts and merging them as many. 84 x 588, 128 heads: 51 us whole, 71 cut into
    # parts (at 2); 4 tokens, 35 x 868, 32 heads: 34 and 48; FlashMLA 66 and 43
    merge_price: int = 6
    part_tiles: int = 8  # tiles of a part, where parts are cut at fixed boundaries
    consumer_registers: int = 240
    producer_registers: int = 24


@dataclass(frozen=True, slots=True, eq=False)
class LatentConstants:
    """Tiles, the shapes of a call, and the division of work as the schedule knows it."""

    tiles: LatentTiles
    work: AttendConstants
    causal: bool
    num_heads: int
    num_packs: int  # of heads: the blocks of a team, which read the same keys side by side
    page_size: int
    block_n: int  # keys of a half, which is what one copy fills
    overlap: bool  # launched while the kernel ahead is still ending

    @property
    def boxes_a_tile(self) -> int:
        """Copies that fill the columns of a half: one, or one for each page."""
        return max(self.block_n // self.page_size, 1)

    @property
    def caps_before_base(self) -> bool:
        """As of HopperConstants: without it, Triton 3.9 keeps the loop out of registers."""
        return True

    @property
    def prefetch_maps(self) -> str:
        """Assembly that fetches the tensor maps; each is followed by two sizes and strides."""
        return prefetch_assembly("attend_latent_kernel", [5] * 5)

    @property
    def max_registers(self) -> int:
        """Of a thread at the start: two consumers and one group of producers share them."""
        return (2 * self.tiles.consumer_registers + self.tiles.producer_registers) // 3


def num_packs_of(num_heads: int) -> int:
    """Teams of blocks that share keys; other numbers of heads fill blocks with (token, head)."""
    return max(num_heads // BLOCK_ROWS, 1) if num_heads % BLOCK_ROWS == 0 else 1


@cache
def latent_constants(
    tiles: LatentTiles,
    *,
    causal: bool,
    num_heads: int,
    page_size: int,
    num_programs: int,
    fixed_parts: bool = False,
    overlap: bool = False,
) -> LatentConstants:
    """Join tiles with the shapes of a call; equal ones are the same object."""
    num_packs = num_packs_of(num_heads)
    config = AttendConfig(
        BLOCK_ROWS,
        TILE_KEYS,
        num_warps=4,
        num_stages=2,
        workers_per_sm=1,
        block_price=tiles.block_price,
        merge_price=tiles.merge_price,
        least_share=1 if fixed_parts else tiles.least_share,
        aligned_growth=tiles.aligned_growth,
        deals=False,
        part_tiles=tiles.part_tiles,
        whole_rows=2048,
    )
    program = attend_program(
        config,
        HeadShape(num_heads // num_packs, num_packs, *LATENT_DIMS),
        StoreTypes(page_size, PLAIN, PLAIN, values_in_keys=True),
        PartKinds(fixed=fixed_parts),
        causal=causal,
        num_programs=num_programs,
        overlap=overlap,
    )
    return LatentConstants(
        tiles, program.constants, causal, num_heads, num_packs, page_size, HALF_KEYS, overlap
    )
