"""Tuning tables: frozen dataclasses and pure functions that select one, evidence beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from anabranch.kernels.versions import CODE_ROWS

WIDE = 256  # columns beyond which queries alone may fill a GPU's shared memory
FEW_SUMS = 4096  # rows times columns of a part that may end inside of the loop over tiles


def power_of_two(size: int) -> int:
    """The next one. Triton's own function is one of the compiler's, and takes 14 us on the host."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Rows (token, head) merged by one program."""

    block_rows: int
    num_warps: int


def select_merge(head_dim: int) -> MergeConfig:
    """At least 2048 elements a program: one row a program is dispatch-bound.

    Rows that are no multiple of 16 elements are loaded one by one; with 4 warps they spill.
    """
    block_rows = max(1, 2048 // power_of_two(head_dim))
    return MergeConfig(block_rows, num_warps=4 if head_dim % 16 == 0 else 8)


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """How attention is tiled and cut."""

    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    workers_per_sm: int
    keys_first: bool = False  # transposed tiles, for few rows
    values_first: bool = False  # values are copied with the keys, not after the scores
    lazy_peak: bool = False  # latent sums are scaled only where a logit exceeds a peak by 8 bits
    paired: bool = False  # blocks of heads read the same latent keys side by side, pages as boxes
    fused_merge: bool = True  # parts are merged by the worker that arrives last
    fan_in: int = 64  # parts merged by one node of the merge tree
    merge_rows: int = 4  # rows merged at a time
    merge_batch: int = 8  # parts loaded at a time
    merge_price: int = 5  # a merge takes as long as this many tiles,
    block_price: int = 2  # and beginning a block as long as this many
    least_share: int = 1  # units of a worker, so that parts are not too small to pay
    aligned_growth: int = 0  # percent that shares may grow so that each lies in one block
    deals: bool = True  # blocks of many rows may be dealt out whole
    max_registers: int | None = None  # a thread may use, so that workers_per_sm fit
    part_tiles: int = 8  # tiles of a part at least, where parts are cut at fixed boundaries
    group_parts: int = 8  # there, parts that are merged before their groups are
    whole_rows: int = 512  # there, sequences with so many query rows are not cut


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Two powers of two that hold a head dim with less padding than one: 192 = 128 + 64."""
    whole = max(16, power_of_two(head_dim))
    main = whole // 2
    rest = max(16, power_of_two(head_dim - main)) if head_dim > main else 0
    return (main, rest) if main >= 16 and main + rest < whole else (whole, 0)


def is_main_tile(head_dim_k: int, head_dim_v: int) -> bool:
    """Whether values that are columns of keys are the first of the two tiles of keys."""
    return max(16, power_of_two(head_dim_v)) == split_head_dim(head_dim_k)[0]


def shared_bytes(
    config: AttendConfig,
    head_dim_k: int,
    head_dim_v: int,
    itemsize: int,
    *,
    code_words: bool = False,
    code_pairs: bool = False,
) -> int:
    """Shared memory of one program: tiles under way, queries, weights, a little for barriers.

    `head_dim_v` is 0 where values are columns of the keys. Small tiles of these, pairs of codes and
    codes for 8 rows are operands in registers, with one buffer less than stages. Codes in words are
    under way as bytes, and unless they are pairs, one tile is converted at a time.
    """
    dim_k = sum(split_head_dim(head_dim_k))
    dim_v = max(16, power_of_two(head_dim_v)) if head_dim_v else 0
    few = config.block_m < 16 if code_words else max(config.block_m, config.block_n) < 64
    in_registers = code_pairs or (few and (code_words or not head_dim_v))
    buffers = max(config.num_stages - in_registers, 1)
    tiles = itemsize * buffers * config.block_n * (dim_k + dim_v)
    if code_words:
        scales = config.num_stages * config.block_n * 16  # of 4 bytes or fewer, for K and V
        converted = 0 if code_pairs else itemsize * config.block_n * max(dim_k, dim_v)
        tiles = tiles // itemsize + converted + scales
    weights = config.block_m * config.block_n if config.keys_first else 0
    return tiles + itemsize * (config.block_m * dim_k + weights) + 1536


def fit_shared_memory(
    config: AttendConfig,
    head_dim_k: int,
    head_dim_v: int,
    itemsize: int,
    *,
    per_program: int,
    per_sm: int,
    code_words: bool = False,
    code_pairs: bool = False,
    folds_parts: bool = False,
) -> AttendConfig:
    """The configuration with fewer stages, smaller tiles and fewer workers, as a GPU needs it.

    With `folds_parts`, sums of a part may pass through shared memory while copies are under way.
    """
    sums = config.block_m * power_of_two(head_dim_v) if folds_parts and head_dim_v else 0
    per_program -= 4 * sums if sums <= FEW_SUMS else 0
    needs = partial(
        shared_bytes,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        itemsize=itemsize,
        code_words=code_words,
        code_pairs=code_pairs and config.keys_first and config.block_m < 16,
    )
    while needs(config) > per_program:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.num_stages > 1 and head_dim_k > WIDE:
            config = replace(config, num_stages=1)
        elif config.block_m > 16 and head_dim_k > WIDE:
            rows = config.block_m // 2
            config = replace(config, block_m=rows, merge_rows=min(config.merge_rows, rows))
        else:
            break
    workers = min(config.workers_per_sm, per_sm // needs(config))
    if code_words and workers < config.workers_per_sm:
        config = replace(config, max_registers=None)
    return replace(config, workers_per_sm=max(workers, 1))


def select_attend(
    *,
    rows_per_seq: float,
    num_pairs: int,
    head_dim_k: int,
    head_dim_v: int,
    itemsize: int,
    window: int | None = None,
    latent: bool = False,
    quantised: bool = False,
    code_pairs: bool = False,
    int8_codes: bool = False,
    code_rows: int = CODE_ROWS,
    box_keys: int = 0,
    fused_merge: bool | None = None,
) -> AttendConfig:
    """Tiles by how many query rows (tokens times group) a sequence has on average.

    `num_pairs` is sequences times kv heads; with `latent`, values are columns of keys; `quantised`
    where keys, values or both are, `code_pairs` where both are loaded by pairs, `int8_codes` where
    one is int8; `code_rows` of other codes make the smallest tile; `box_keys` keys of a page can be
    copied as a box, none if it is 0; `fused_merge` is None where parts may be merged either way.
    Microseconds are medians on an H200, bfloat16, 32/8 heads of 128 unless said otherwise.
    """
    head_dim = max(head_dim_k, head_dim_v)
    if head_dim > WIDE:
        if latent and rows_per_seq > 32 and itemsize == 2:
            boxed, apart = box_keys > 0 and box_keys % 64 == 0, fused_merge is not True
            return _select_latent(rows_per_seq, num_pairs, boxed, quantised, apart)
        config = _select_wide(rows_per_seq, itemsize, latent)
        if latent and num_pairs <= 8 and itemsize == 2 and fused_merge is not True:
            return replace(config, fused_merge=False, merge_rows=1, merge_batch=16, least_share=2)
        return config
    if itemsize == 4:
        return AttendConfig(16 if rows_per_seq <= 16 or head_dim > 128 else 32, 32, 4, 2, 1)
    if code_pairs and rows_per_seq <= 8:
        return _select_pairs(num_pairs, int8_codes)
    if quantised and rows_per_seq <= 32:
        least = code_rows if head_dim <= 128 else 16
        return _select_decoding(next(x for x in (least, 16, 32) if rows_per_seq <= x), head_dim)
    if rows_per_seq <= 32:
        return _select_short(16 if rows_per_seq <= 16 else 32, rows_per_seq, num_pairs, head_dim)
    if rows_per_seq <= 64 or quantised:
        warps, workers = (4, 2) if head_dim <= 128 else (8, 1)
        return AttendConfig(64, 64, warps, 2, workers, merge_rows=16, merge_batch=4)
    return _select_long(rows_per_seq, head_dim, window)


def _select_short(rows: int, rows_per_seq: float, num_pairs: int, head_dim: int) -> AttendConfig:
    """Decode and verify: transposed tiles, as many bytes under way as fit."""
    config = partial(AttendConfig, rows, keys_first=True, part_tiles=4)
    rows_at_once, batch = (4, 8) if rows_per_seq <= 8 else (16, 4)
    merge = {"merge_rows": rows_at_once, "merge_batch": batch}
    if head_dim > 128:
        return config(32, 4, 3, 2 if rows == 16 else 1, **merge)
    if head_dim <= 64 and rows == 16:  # 32 x 4096: 67 against 80 in tiles of 64 keys
        return config(128, 4, 3, 2, **merge)
    if num_pairs <= 32 and rows == 16:  # 1 x 8192: 18.0 against 22.3 in tiles of 64 keys
        return config(128, 4, 3, 1, **merge)
    if num_pairs <= 32:  # 8 tokens, 1 x 32768: 48.6 against 51.8 untransposed
        return config(128, 8, 3, 1, merge_rows=32, merge_batch=8)
    if num_pairs >= 512 and rows == 16:  # 128 x 1024: 129.7 against 131.2
        return config(32, 4, 3, 4, **{**merge, "merge_batch": 4}, max_registers=128)
    if rows == 32:  # 3 tokens, 8 x 259, 64/8 heads: 10.6, merging 16 rows at a time 11.4
        return AttendConfig(rows, 64, 4, 3, 2, merge_rows=32, merge_batch=4, part_tiles=4)
    # 8 x 8192: 69.1 against 69.9 at a price of 2, 4 tokens 71.6 against 72.2
    return config(64, 4, 3, 2, **merge, block_price=4)


def _select_pairs(num_pairs: int, int8_codes: bool) -> AttendConfig:
    """Codes of 8 bits by pairs of keys. Times are for tiles of 128 keys, and of 64.

    64 x 8192, bfloat16 484: fp8 with one scale a tensor 267 and 274, fp8 285 and 291, int8 317 and
    296. 1 x 32768, bfloat16 43.4: 30.9 and 38.1, 31.7 and 39.1, 34.5 and 40.0.
    """
    # Without groups of fixed parts: their sums would be spilled in every tile.
    config = partial(AttendConfig, 8, keys_first=True, merge_rows=4, merge_batch=8, group_parts=1)
    if int8_codes and num_pairs >= 256:
        return config(64, 4, 3, 4, max_registers=128, part_tiles=8)
    return config(128, 4, 3, 2, part_tiles=4)


def _select_decoding(rows: int, head_dim: int) -> AttendConfig:
    """Quantised keys: converting codes takes issue slots, so three workers share a processor.

    64 x 8192, bfloat16 487: fp8 with one scale a tensor 287 (in tiles of 128 keys 328), fp8 320
    (356), int8 330 (378), Q8_0 340 (393). A fourth worker, with 128 registers: 285, 318, 332, 415.
    """
    if head_dim > 128:
        workers, merge = 2 if rows == 16 else 1, {"merge_rows": 4, "merge_batch": 4}
        return AttendConfig(rows, 32, 4, 3, workers, **merge, part_tiles=4)
    config = partial(AttendConfig, rows, 64, 4, 3, keys_first=True, merge_rows=4, merge_batch=8)
    if rows == 32:
        return config(2, part_tiles=4)
    config = partial(config, part_tiles=8, group_parts=1)  # without groups, as by pairs
    return config(3, max_registers=168) if rows == 16 else config(4, max_registers=128)


def _select_wide(rows_per_seq: float, itemsize: int, latent: bool) -> AttendConfig:
    """More than 256 columns: 64 rows with float32 sums of 512 columns fill the registers."""
    merge = {"merge_rows": 4, "merge_batch": 4, "whole_rows": 2048}
    if itemsize == 4:
        return AttendConfig(16, 16, 4, 2, 1, **merge)
    if rows_per_seq <= 16:  # latent, 64 x 8192, 16 heads: 165, 167 with a lazy peak
        return AttendConfig(16, 32, 4, 3, 2 if latent else 1, keys_first=not latent, **merge)
    if rows_per_seq <= 32:
        return AttendConfig(32, 32, 8, 3, 1, keys_first=True, **merge)
    return AttendConfig(64, 32, 8, 2, 1, **merge)


def _select_latent(
    rows_per_seq: float, num_pairs: int, boxed: bool, quantised: bool, may_merge_apart: bool
) -> AttendConfig:
    """Latent keys and more than 32 rows. Microseconds are for 128 heads.

    Side by side, with pages as boxes: 128 x 4096 413 against 479, 16 x 8192 148 against 162;
    without boxes 494 and 167. A merge by a launch of its own, 1 x 8192: 28 in boxes, 31 without, 66
    by workers that arrive last.
    """
    config = partial(AttendConfig, 64, 64, 8, 2, 1, lazy_peak=True, whole_rows=2048)
    if num_pairs <= 8 and rows_per_seq <= 512 and may_merge_apart:
        config = partial(config, fused_merge=False, merge_rows=1, merge_batch=16)
        return config(least_share=3 if boxed else 2, paired=not quantised)
    config = partial(config, paired=boxed, merge_rows=16, merge_batch=4)
    if num_pairs <= 8:  # 1 x 8192: 66 against 70 merged 8 at a time, 81 merged 16
        return config(least_share=4, fan_in=4)
    return config()


def _select_long(rows_per_seq: float, head_dim: int, window: int | None) -> AttendConfig:
    """Prefill: the largest tiles whose accumulators fit into registers, for long sequences.

    Values are copied with the keys: what keeps the warps in step then stands between two tiles and
    not between scores and softmax, and one warpgroup computes weights while another multiplies.
    1 x 8192: 945 against 1190. The copies need a third stage to be ahead.
    """
    config = partial(AttendConfig, merge_batch=2, values_first=True)
    many_keys = rows_per_seq >= 8192 and window is None
    if head_dim <= 64 and many_keys:  # 1 x 4096, 9/3 heads: 51.7 against 58.7
        return config(64, 128, 4, 3, 2, merge_rows=16, block_price=2)
    if head_dim <= 64:  # 8 x 1024, 64/16 heads: 215 against 263
        return config(64, 64, 4, 3, 3, merge_rows=16, block_price=3, max_registers=168)
    if head_dim <= 128 and rows_per_seq >= 16384 and many_keys:  # 1 x 4096: 264 against 273
        return config(128, 128, 8, 3, 1, merge_rows=32, block_price=3)
    if head_dim <= 128:  # 2 x 2048: 168 against 199; 1 x 4096, window 1024: 147 against 167
        return config(64, 64, 4, 3, 2, merge_rows=16, block_price=5)
    if head_dim <= 192:
        return config(128, 64, 8, 3, 1, merge_rows=32, block_price=4)
    # Two stages are all that fits, and copies under way must not wait for each other: 1 x 8192,
    # 256 dims: 2108 against 2348
    return config(128, 64, 8, 2, 1, merge_rows=32, block_price=4, values_first=False)
