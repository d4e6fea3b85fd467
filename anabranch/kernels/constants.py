"""What a compiled attention kernel is specialised for; never a length or a batch size."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.keys import StoreFormat


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sides of tiles, and which of them come first."""

    block_m: int  # query rows
    block_n: int  # keys
    dk_main: int  # head_dim_k <= dk_main + dk_rest, powers of two
    dk_rest: int
    block_dv: int  # the power of two that holds head_dim_v
    keys_first: bool
    values_first: bool
    lazy_peak: bool
    paired: bool


@dataclass(frozen=True, slots=True)
class Division:
    """How work is divided among programs."""

    num_programs: int
    num_workers: int  # teams of one program for each kv head
    block_price: int
    merge_price: int
    least_share: int
    aligned_growth: int
    deals: bool  # blocks may be dealt out whole: those of many rows are enough to fill the GPU
    fixed_parts: bool  # parts end where their own sequence says, whichever worker attends to them
    folds_parts: bool  # a worker that holds all fixed parts of a block merges them as they end
    part_tiles: int
    most_parts: int
    whole_rows: int
    # Fixed parts end inside one loop over all tiles of them, so that copies stay ahead. More sums,
    # those of the parts before beside them, leave no room in registers and shared memory.
    closes_inside: bool
    uniform: bool = False  # a program for each part of part_tiles tiles, without a schedule


@dataclass(frozen=True, slots=True)
class Merging:
    """How parts are merged."""

    fused: bool  # by the worker that arrives last, not by a second launch
    fan_in: int
    group_parts: int  # fixed parts that are folded into one before groups are; 1 without groups
    rows: int
    batch: int


@dataclass(frozen=True, slots=True)
class ListShape:
    """How lists of keys belong to heads, and the pages that their keys lie in."""

    per_token: int
    num_kv_heads: int
    page_size: int


@dataclass(frozen=True, slots=True)
class StoreConstants:
    """How keys, or values, are stored and loaded."""

    dim: int
    format: StoreFormat
    has_values: bool  # tiles are multiplied by weights
    # (page, key) of a paged cache: as constants they save a fifth of the loop's instructions
    strides: tuple[int, int] | None = None
    # (page, key, head); None for heads that lie first, where it depends on the number of pages
    scale_strides: tuple[int, int, int | None] | None = None
    words: bool = False  # codes are loaded four at a time


@dataclass(frozen=True, slots=True)
class Source:
    """Where keys lie."""

    page_size: int  # 1 for contiguous keys, which have no pages
    k: StoreConstants
    v: StoreConstants
    is_plain: bool  # keys and values are numbers in tiles of their own
    one_tile: bool  # a tile of values is the main part of the tile of keys
    native_fp8: bool  # the GPU has the type float8_e4m3fn
    is_paged: bool = False  # there is a page table
    wide_pages: bool = False  # a page spans 2^31 elements or more
    pairs: bool = False  # both are loaded by pairs of keys
    quads: bool = False  # products take four dims next to each other from a thread
    scales_sums: bool = False  # the one scale of values is multiplied into the sum over all tiles
    packed: bool = False  # NVIDIA's instructions for pairs of halves are there
    lists: ListShape | None = None  # the table holds lists of keys, which are looked up as read
    list_heads: tuple[int, int] | None = None  # (lists of a token, kv heads) of quantised keys


@dataclass(frozen=True, slots=True, eq=False)
class AttendConstants:
    """All of it."""

    causal: bool
    group: int  # query heads for each kv head
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    overlap: bool  # launched while the kernel ahead is still ending
    tiles: Tiles
    division: Division
    merging: Merging
    source: Source
    leaves_empty: bool = False  # rows that see no key are not written
    num_priors: int = 0  # states that a call goes on from
