"""What a compiled attention kernel is specialised for; never a length or a batch size.

Constants and programs are made by cached functions: equal ones are the same object, and a launch
hashes a pointer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from anabranch.kernels.config import (
    FEW_SUMS,
    AttendConfig,
    is_main_tile,
    power_of_two,
    split_head_dim,
)
from anabranch.kernels.versions import NARROW_IN_WARPS
from anabranch.keys import StoreFormat

MOST_PARTS = 64  # fixed ones of a block, if there are so many workers
UNBOUNDED = 1 << 30


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


@dataclass(frozen=True, slots=True, eq=False)
class AttendProgram:
    """Constants, and what the compiler is told beside them."""

    constants: AttendConstants
    options: dict[str, int]


class HeadShape(NamedTuple):
    """Heads that a kernel sees, and how long keys and values are."""

    group: int  # query heads for each kv head
    num_kv_heads: int
    dim_k: int
    dim_v: int


class StoreTypes(NamedTuple):
    """How the keys of a call are stored, and what a GPU has to read them."""

    page_size: int  # 1 for contiguous keys
    k: StoreFormat
    v: StoreFormat
    values_in_keys: bool = False
    native_fp8: bool = False
    packed: bool = False


class PartKinds(NamedTuple):
    """Where keys are cut into parts, and who merges them."""

    fixed: bool = False
    folded: bool = False  # fixed, and merged by the worker that holds all of a block
    uniform: bool = False  # fixed, with a program for each
    fused: bool = True


@cache
def attend_program(
    config: AttendConfig,
    heads: HeadShape,
    types: StoreTypes,
    parts: PartKinds,
    *,
    causal: bool,
    num_programs: int,
    overlap: bool = False,
    leaves_empty: bool = False,
    limit_registers: bool = True,
) -> AttendProgram:
    """Join a configuration with the shapes of a call."""
    one_tile = types.values_in_keys and is_main_tile(heads.dim_k, heads.dim_v)
    paired = config.paired and one_tile
    if paired and heads.group % config.block_m == 0:  # each block of heads with keys of its own
        heads = heads._replace(num_kv_heads=heads.group // config.block_m, group=config.block_m)
    tiles = _tiles_of(config, heads, types, paired)
    sums_fit = parts.folded and tiles.block_m * tiles.block_dv <= FEW_SUMS
    constants = AttendConstants(
        causal=causal,
        group=heads.group,
        num_kv_heads=heads.num_kv_heads,
        head_dim_k=heads.dim_k,
        head_dim_v=heads.dim_v,
        overlap=overlap,
        leaves_empty=leaves_empty,
        tiles=tiles,
        division=_division_of(config, heads, parts, num_programs, sums_fit),
        merging=Merging(
            fused=parts.fused,
            fan_in=config.fan_in,
            group_parts=config.group_parts if sums_fit else 1,
            rows=min(config.merge_rows, config.block_m),
            batch=config.merge_batch,
        ),
        source=Source(
            page_size=types.page_size,
            k=StoreConstants(heads.dim_k, types.k, has_values=one_tile),
            v=StoreConstants(heads.dim_v, types.v, has_values=True),
            is_plain=types.k.scaling == types.v.scaling == "none" and not one_tile,
            one_tile=one_tile,
            native_fp8=types.native_fp8,
            packed=types.packed,
        ),
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None and limit_registers:
        options["maxnreg"] = config.max_registers
    return AttendProgram(constants, options)


def _tiles_of(config: AttendConfig, heads: HeadShape, types: StoreTypes, paired: bool) -> Tiles:
    main, rest = split_head_dim(heads.dim_k)
    return Tiles(
        block_m=config.block_m,
        block_n=config.block_n,
        dk_main=main,
        dk_rest=rest,
        block_dv=max(16, power_of_two(heads.dim_v)),
        keys_first=config.keys_first,
        values_first=config.values_first,
        lazy_peak=config.lazy_peak and types.values_in_keys and not config.keys_first,
        paired=paired,
    )


def _division_of(
    config: AttendConfig, heads: HeadShape, parts: PartKinds, num_programs: int, sums_fit: bool
) -> Division:
    any_fixed = parts.fixed or parts.folded or parts.uniform
    num_workers = max(num_programs // heads.num_kv_heads, 1)
    return Division(
        num_programs=max(num_programs, heads.num_kv_heads),
        num_workers=num_workers,
        block_price=0 if parts.folded else config.block_price,
        merge_price=config.merge_price,
        least_share=config.least_share,
        aligned_growth=config.aligned_growth,
        deals=config.deals and config.block_m >= 64 and (parts.folded or not any_fixed),
        fixed_parts=any_fixed,
        folds_parts=parts.folded,
        closes_inside=sums_fit,
        uniform=parts.uniform,
        part_tiles=config.part_tiles,
        most_parts=min(num_workers, MOST_PARTS) if parts.folded else UNBOUNDED,
        whole_rows=config.whole_rows,
    )


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """How the codes of quantised stores can be loaded."""

    k_scale_strides: tuple[int, int, int | None] | None
    v_scale_strides: tuple[int, int, int | None] | None
    k_words: bool
    v_words: bool
    pairs: bool
    list_heads: tuple[int, int] | None


@cache
def for_call(
    constants: AttendConstants,
    *,
    strides: tuple[tuple[int, int], tuple[int, int]] | None,  # of pages and keys, where paged
    codes: StoredCodes | None = None,
    lists: ListShape | None = None,
    num_priors: int = 0,
    has_sinks: bool = False,
) -> AttendConstants:
    """The constants with what the stores of a call and its states say."""
    source, tiles = constants.source, constants.tiles
    k, v = source.k, source.v
    if strides is not None:
        k, v = replace(k, strides=strides[0]), replace(v, strides=strides[1])
        wide = source.page_size * max(strides[0][1], strides[1][1]) >= 1 << 31
        source = replace(source, is_paged=True, wide_pages=wide)
    if codes is not None:
        v_words = codes.v_words and not tiles.values_first
        pairs = codes.pairs and tiles.keys_first and tiles.block_m < 16
        k = replace(k, scale_strides=codes.k_scale_strides, words=codes.k_words)
        v = replace(v, scale_strides=codes.v_scale_strides, words=v_words)
        source = replace(
            source,
            pairs=pairs,
            quads=pairs and (NARROW_IN_WARPS or not constants.overlap),
            scales_sums=v_words and v.format.scaling == "tensor",
            list_heads=codes.list_heads,
        )
    every_row = num_priors > 0 or has_sinks  # has a state, whether it sees a key or not
    return replace(
        constants,
        source=replace(source, k=k, v=v, lists=lists),
        num_priors=num_priors,
        leaves_empty=constants.leaves_empty and not every_row,
    )
