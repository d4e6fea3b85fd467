"""Constants of attention kernels, made of tiles and of what is known of a call.

The functions are cached: equal constants are the same object, and a launch hashes a pointer.
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
from anabranch.kernels.constants import (
    AttendConstants,
    Division,
    ListShape,
    Merging,
    Source,
    StoreConstants,
    Tiles,
)
from anabranch.kernels.versions import NARROW_IN_WARPS
from anabranch.keys import StoreFormat

MOST_PARTS = 64  # fixed ones of a block, if there are so many workers
UNBOUNDED = 1 << 30


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
