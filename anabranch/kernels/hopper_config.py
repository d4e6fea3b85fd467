"""Tiles of the Hopper kernel, measurements beside each choice, and what it is compiled for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from anabranch.kernels import versions
from anabranch.kernels.config import power_of_two, split_head_dim

# Key and value head dims that tiles have been chosen and tested for: each is one power of two, or
# two of them (80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64).
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
CACHE_BYTES = 40 << 20  # of an H200's L2 cache of 60 MB that keys and values may fill


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How the kernel is tiled; blocks have 128 rows."""

    block_n: int  # keys of a tile
    stages: int  # tiles of K, and of V, under way
    q_columns: int  # of the main columns of Q, the first ones, which stay in registers
    out_columns: int = 64  # staged at a time
    consumer_registers: int = 240
    producer_registers: int = 24


BLOCK_ROWS = 128  # of a block: two consumers of 64
PARTS_A_PROGRAM = 4  # of BLOCK_ROWS rows, that wait for their merge at most
MAX_PACK = 64  # heads of a block: the rows of one consumer are whole tokens
FEW_BLOCKS = 66  # with their heads: half of the processors of an H200
FEW_KEYS = 256  # that the rows of a block see: two wide tiles
FEW_TILES = 5  # of 128 keys, for each processor, of blocks that are few
FEW_ROWS = 64  # of a sequence
MOST_FIXED_PARTS = 64  # of a block


def select_tiles(
    head_dim_k: int,
    head_dim_v: int,
    *,
    few_blocks: bool = False,
    few_keys: bool = False,
    splits: bool = False,
) -> HopperTiles:
    """Tiles whose accumulators and scores fit into 240 registers a thread.

    Microseconds of trial runs on an H200, bfloat16, 1 x 8192 unless said otherwise. The accumulator
    is rescaled at the end of the loop: 32/8 heads of 128, 863 against 878 while the scores run.
    `few_blocks` of few rows or keys are cut into parts, which begin sooner in small tiles. 70
    tokens of 16/4 heads, window 4096: 17.5 against 20.5; 49 of 14/2 heads at 13988 keys, 7 tiles a
    processor, 24.0 against 23.4. 32 queries, 8 x
    4096: 49.2 against 50.7; 8 queries, 8 x 1024: 17.3 against 19.4; 32/1 heads, 32 x 8192: 42.1
    against 43.1. Many blocks lose by them: 8 queries, 64 x 4096: 291 against 270. Blocks that see
    `few_keys` end sooner: 32 x 128 30.6 against 36.2; 8192 tokens, 64/8 heads of 64, window 128:
    111 against 166.
    """
    if head_dim_k > 192 or head_dim_v > 128:
        return HopperTiles(64, 2, q_columns=0 if splits else versions.WIDE_QUERY_COLUMNS)
    main = split_head_dim(head_dim_k)[0]
    whole = versions.QUERY_COLUMNS if main > 64 else main
    q_columns = min(main, versions.CUT_QUERY_COLUMNS if splits else whole)
    if head_dim_k <= 128 and (few_keys or (few_blocks and head_dim_k > 64)):
        return HopperTiles(64, 3, q_columns)
    if head_dim_k <= 64:  # 8 x 1024, 64/16 heads: 212 against 216 with two stages
        return HopperTiles(128, 3, q_columns)
    # 192/128, 16 heads: 532 against 547 with Q in shared memory
    return HopperTiles(128, 2, q_columns)


class Packing(NamedTuple):
    """Rows of a block: tokens times `pack` heads, of which the first `heads` exist."""

    pack: int  # a power of two
    heads: int


def select_packing(group: int, tokens_per_seq: float, num_decodes: int = 0) -> Packing:
    """Heads whose rows share a block: a power of two in the group, or the group and padding.

    Groups of 3, 5 or 7 have no power of two: without padding, few tokens leave most of a block
    empty, and every head reads the keys anew. What needs fewer blocks is chosen; equally many rows
    a sequence give the same choice in any batch. Beside many sequences of one token, whose time is
    that of reading keys, padding may cost a quarter more blocks.
    """
    inside, padded = group & -group, power_of_two(group)
    if inside == padded or padded > MAX_PACK:
        return Packing(min(inside, MAX_PACK), min(inside, MAX_PACK))
    if 8 * num_decodes < math.ceil(tokens_per_seq * padded / BLOCK_ROWS):
        num_decodes = 0
    blocks_inside = math.ceil(tokens_per_seq * inside / BLOCK_ROWS) + num_decodes
    blocks_padded = math.ceil(tokens_per_seq * padded / BLOCK_ROWS) + num_decodes
    most = blocks_inside * (group // inside)
    if num_decodes:
        most *= 1.25
    return Packing(padded, group) if blocks_padded < most else Packing(inside, inside)


def prefetch_assembly(kernel: str, sizes: Sequence[int]) -> str:
    """Assembly that fetches tensor maps, each the first of so many parameters of a kernel."""
    lines = [
        f"@first prefetch.param.tensormap [{kernel}_param_{place}];"
        for place in accumulate(sizes[:-1], initial=0)
    ]
    thread = "mov.u32 $0, %tid.x; setp.eq.u32 first, $0, 0;"
    return f"{{ .reg .pred first; {thread} {' '.join(lines)} }}"


@dataclass(frozen=True, slots=True, eq=False)
class HopperConstants:
    """What the kernel is compiled for; never a length or a batch size."""

    causal: bool
    pack: int  # query heads of one kv head whose rows share a block, a power of two
    pack_heads: int  # those that exist
    num_packs: int
    packs_per_kv: int
    page_size: int  # 0 for contiguous keys
    dk_main: int  # head_dim_k = dk_main + dk_rest, powers of two
    dk_rest: int
    dv_main: int
    dv_rest: int
    block_n: int
    stages: int
    q_columns: int
    out_columns: int
    consumer_registers: int
    producer_registers: int
    num_programs: int
    fixed_parts: bool
    splits: bool  # blocks may be cut, or have few rows: whole ones are slower with that code
    overlap: bool  # launched while the kernel ahead is still ending

    @property
    def frees_queries_early(self) -> bool:
        """Whether a consumer holds all of Q in registers, so that the next may be copied."""
        return self.q_columns == self.dk_main and not self.dk_rest

    @property
    def caps_before_base(self) -> bool:
        """Whether capped logits have a product of their own, not one with the base of exponents.

        4096 tokens, 16/8 heads of 256: 222 us without it, 226 with it.
        """
        return False

    @property
    def most_fixed_parts(self) -> int:
        """Of a block cut at fixed boundaries: with all packs, one block fills the GPU."""
        return min(max(self.num_programs // self.num_packs, 1), MOST_FIXED_PARTS)

    @property
    def max_registers(self) -> int:
        """Of a thread at the start: two consumers and one group of producers share them."""
        return (2 * self.consumer_registers + self.producer_registers) // 3

    @property
    def prefetch_maps(self) -> str:
        """Assembly that fetches the tensor maps, which are the kernel's first parameters.

        A map is followed by the shape and strides of its tensor: three dimensions of queries and
        results, two of keys and values.
        """
        ranges_k, ranges_v = 1 + bool(self.dk_rest), 1 + bool(self.dv_rest)
        sizes = [7] * ranges_k + [5] * (ranges_k + ranges_v) + [7] * ranges_v
        return prefetch_assembly("attend_kernel", sizes)

    @property
    def boxes_a_tile(self) -> int:
        """How many copies fill a tile: one, or one for each page."""
        return max(self.block_n // self.page_size, 1) if self.page_size else 1

    @property
    def bytes_a_key(self) -> int:
        """Of K and V of one kv head."""
        return 2 * (self.dk_main + self.dk_rest + self.dv_main + self.dv_rest)


@dataclass(frozen=True, slots=True, eq=False)
class OrderConstants:
    """What the order of items is compiled for: a few kinds serve all models."""

    causal: bool
    pack: int
    block_n: int
    num_programs: int
    fixed_parts: bool
    splits: bool


class CutPrices(NamedTuple):
    """What items and cutting blocks cost; TILE_PRICE is what a tile takes."""

    item: int  # its queries, the wait for the first keys, its results
    merge: int  # the launch that merges parts, if there are any
    part: int  # each part of 128 rows that a program writes
    batch: int  # parts of a block that are merged after the first MERGE_BATCH of them


class PackFacts(NamedTuple):
    """What the order of items is told of heads.

    Whole numbers, as floats: Triton compiles another program for integers that are 1 or that 16
    divides, and of those in tuples it cannot be told not to.
    """

    num_packs: float
    packs_per_kv: float
    bytes_a_key: float
    item_price: float  # these are CutPrices
    merge_price: float
    part_price: float
    batch_price: float


TILE_PRICE = 16
MERGE_BATCH = 16  # parts that are loaded at once where rows are few


@cache
def order_constants(constants: HopperConstants) -> OrderConstants:
    """The part of the constants that the order of items is compiled for."""
    return OrderConstants(
        constants.causal,
        constants.pack,
        constants.block_n,
        constants.num_programs,
        constants.fixed_parts,
        constants.splits,
    )


@cache
def cut_prices(constants: HopperConstants) -> CutPrices:
    """In tiles of 128 keys and heads of 128, of which one takes about 1.2 us."""
    head_dims = constants.bytes_a_key // 2
    tile = constants.block_n * head_dims / (128 * 256)
    prices = 1.5, 2.25, head_dims / 256, 1.75
    return CutPrices(*(round(TILE_PRICE * price / tile) for price in prices))


def pack_facts(constants: HopperConstants) -> PackFacts:
    """The part of the constants that the order of items is told."""
    packs = constants.num_packs, constants.packs_per_kv, constants.bytes_a_key
    return PackFacts(*map(float, (*packs, *cut_prices(constants))))


@cache
def hopper_constants(
    tiles: HopperTiles,
    *,
    causal: bool,
    packing: Packing,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    head_dim_k: int,
    head_dim_v: int,
    num_programs: int,
    fixed_parts: bool = False,
    splits: bool = True,
    overlap: bool = False,
) -> HopperConstants:
    """Join tiles with the shapes of a call; equal ones are the same object."""
    (dk_main, dk_rest), (dv_main, dv_rest) = map(split_head_dim, (head_dim_k, head_dim_v))
    assert (dk_main + dk_rest, dv_main + dv_rest) == (head_dim_k, head_dim_v)
    return HopperConstants(
        causal=causal,
        pack=packing.pack,
        pack_heads=packing.heads,
        num_packs=num_heads // packing.heads,
        packs_per_kv=num_heads // num_kv_heads // packing.heads,
        page_size=page_size,
        dk_main=dk_main,
        dk_rest=dk_rest,
        dv_main=dv_main,
        dv_rest=dv_rest,
        num_programs=num_programs,
        fixed_parts=fixed_parts,
        splits=splits,
        overlap=overlap,
        **asdict(tiles),
    )
