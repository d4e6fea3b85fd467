"""The state of a block of query rows over tiles of keys: load, score, logits, load, update."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import (
    dim_ptrs,
    first_pages,
    load_rows,
    next_keys,
    pages_of,
    place_tile,
)
from anabranch.kernels.load.key_pairs import order_weights, permute_sums, restore_sums
from anabranch.kernels.load.loaders import Columns, column_ptrs, head_of, loader_of
from anabranch.kernels.load.packed_codes import permute_dims, unit_of
from anabranch.kernels.softmax.online_softmax import (
    empty_state,
    finish_state,
    logits_of,
    score,
    seen_by_all,
    sink_state,
    spread_total,
    update_lazily,
    update_state,
)
from anabranch.kernels.triton.fixed_parts import Fold, empty_merges, keep_part
from anabranch.kernels.triton.prior_states import resume


class Operands(NamedTuple):
    """What a launch was given, but for its schedule."""

    q: Any  # Rows
    view: Any  # ViewArguments
    boxes: Any  # Boxes, or None for each
    table_stride: Any
    rules: Any  # Rules, with the scale of logits in base 2
    tree_width: Any
    prior: Any  # PriorArguments or None
    results: Any  # StateRows


class QueryRows(NamedTuple):
    """The rows of a block."""

    main: Any  # [block_m, dk_main]
    rest: Any  # [block_m, dk_rest]
    tokens: Any  # [block_m], counted in the sequence
    places: Any  # [block_m], tokens counted in the batch
    heads: Any  # [block_m]
    inside: Any  # [block_m], whether a row is one of the sequence
    tree_rows: Any  # pointers [block_m] or None


class TileRange(NamedTuple):
    """Tiles [first, stop) to attend to; every token sees all keys of [full_start, full_stop)."""

    first: Any
    stop: Any
    full_start: Any
    full_stop: Any


@triton.jit
def attend_block(item, is_first, given, C: tl.constexpr):
    """Attend to the tiles of an item; the first part of a block also holds sinks and prior states.

    The state of the last part there, and the merges of the parts before it.
    """
    block, q, rules = item.block, given.q, given.rules
    num_rows = block.q_len * C.group
    own = block.first_row + tl.arange(0, C.tiles.block_m)
    row_mask = own < num_rows
    tokens = own // C.group
    heads = item.kv_head * C.group + own % C.group
    offsets = (block.q_start + tokens).to(tl.int64) * q.token + heads.to(tl.int64) * q.head
    offsets = tl.where(row_mask, offsets, 0)  # rows that are never written read some row
    ptrs = dim_ptrs(q.ptr, q.dim, 0, C.tiles.dk_main)
    q_main = load_rows(ptrs, offsets, 0, C.tiles.dk_main, C.head_dim_k)
    q_rest = q_main  # unused without a rest
    if C.tiles.dk_rest > 0:
        ptrs = dim_ptrs(q.ptr, q.dim, C.tiles.dk_main, C.tiles.dk_rest)
        q_rest = load_rows(ptrs, offsets, C.tiles.dk_main, C.tiles.dk_rest, C.head_dim_k)
    tree_rows = None
    if rules.tree_mask is not None:  # rows that are never written read their sequence's first
        own_tokens = tl.where(row_mask, tokens, 0)
        tree_rows = rules.tree_mask + (block.q_start + own_tokens).to(tl.int64) * given.tree_width
    queries = QueryRows(q_main, q_rest, tokens, block.q_start + tokens, heads, row_mask, tree_rows)
    peak, total, acc = empty_state(C.tiles.block_m, C.tiles.block_dv)
    if rules.sinks is not None:
        logits = tl.load(rules.sinks + heads, row_mask & is_first, other=float("-inf"))
        peak, total = sink_state(logits.to(tl.float32))
    if C.num_priors > 0 and not C.source.scales_sums:
        mask = row_mask & is_first
        peak, total, acc = resume((peak, total, acc), given.prior, queries.places, heads, mask, C)
    state = transpose_state((peak, total, acc), C)
    fold = ()
    if C.division.closes_inside:
        fold = Fold(empty_merges(C), item.part, item.tile + item.part_tiles)

    tile = item.tile
    full_start = tile
    full_stop = tile
    if C.tiles.block_m >= 64:
        last_row = tl.minimum(block.first_row + C.tiles.block_m, num_rows) - 1
        start, end = seen_by_all(
            block.first_row // C.group, last_row // C.group, block, rules, C.causal
        )
        full_start = tl.cdiv(start, C.tiles.block_n)
        full_stop = end // C.tiles.block_n
    if given.boxes[0] is not None:
        boxed_stop = tl.minimum(block.seq_len // C.tiles.block_n, item.stop)
        tiles = TileRange(tile, boxed_stop, full_start, full_stop)
        state, fold = attend_tiles(state, fold, tiles, queries, item, given, C, True)
        tile = tl.maximum(tile, boxed_stop)
    has_tiles = tile < item.stop
    if C.division.uniform:
        has_tiles = True  # known to the compiler
    if has_tiles:
        tiles = TileRange(tile, item.stop, full_start, full_stop)
        state, fold = attend_tiles(state, fold, tiles, queries, item, given, C, False)
    merges = ()
    if C.division.closes_inside:
        merges = fold.merges
        is_first = fold.part == 0
    return collect_state(state, queries, is_first, given, C), merges


@triton.jit
def attend_tiles(
    state,
    fold,  # of fixed parts, as `close_part` takes it
    tiles,  # TileRange
    queries,  # QueryRows
    item,  # Item
    given,  # Operands
    C: tl.constexpr,
    BOXED: tl.constexpr,
):
    """Attend to tiles: the state of the last part, and what is folded of the parts before.

    BOXED tiles lie wholly inside the sequence, and the tensor memory accelerator copies them.
    """
    block, view, stop = item.block, given.view, tiles.stop
    K: tl.constexpr = C.source.k
    V: tl.constexpr = C.source.v
    KEYS: tl.constexpr = loader_of(C, K, BOXED)
    VALUES: tl.constexpr = loader_of(C, V, BOXED)
    ONE_TILE: tl.constexpr = C.source.one_tile  # of keys and values
    AHEAD: tl.constexpr = C.tiles.values_first or ONE_TILE  # pages are looked up before the scores
    DTYPE: tl.constexpr = queries.main.dtype
    DK: tl.constexpr = C.tiles.dk_main
    DV: tl.constexpr = C.tiles.block_dv
    ORDER: tl.constexpr = order_weights if C.source.pairs else None
    q, units, row_units = queries.main, None, None
    if K.words:
        units, inverse = unit_of(tl.max(tl.abs(q).to(tl.float32), 1))
        q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
        q = permute_dims(q, C.source.quads)
        if C.tiles.keys_first:
            q = tl.trans(q)  # in the loop, int8 has 0.95 of the speed with Triton 3.9, here 1.01
        if given.rules.softcap is None and view.log_weights is None:
            row_units = units
    base_scale = given.rules.scale
    if K.words and K.format.scaling == "tensor":
        base_scale *= tl.load(view.k.scales.ptr)
    kv_head = head_of(item, C)
    keys = Columns(view.k, column_ptrs(view.k, kv_head, 0, DK), given.boxes[0], kv_head)
    rest = keys  # unused without a rest
    if C.tiles.dk_rest > 0:
        ptrs = column_ptrs(view.k, kv_head, DK, C.tiles.dk_rest)
        rest = Columns(view.k, ptrs, given.boxes[1], kv_head)
    values = Columns(view.v, column_ptrs(view.v, kv_head, 0, DV), given.boxes[2], kv_head)
    box_row = 0
    if BOXED and not C.source.is_paged:
        box_row = block.origin * (view.k.page // view.k.key)
    pages = first_pages(tiles.first, block, given, C)
    for index in tl.range(tiles.first, stop):
        at = place_tile(index, pages, box_row, block, C, BOXED)
        # Loading V before K moves the barrier that the compiler puts between the copies of two
        # tiles: it stands between iterations, and not between scores and softmax.
        if C.tiles.values_first and not ONE_TILE:
            v, v_places = VALUES.tile(values, at, 0, DV, DTYPE, V, C)
        k, k_places = KEYS.tile(keys, at, 0, DK, DTYPE, K, C)
        k_rest = k  # unused without a rest
        if C.tiles.dk_rest > 0:
            k_rest, _ = KEYS.tile(rest, at, DK, C.tiles.dk_rest, DTYPE, K, C)
        # The next tile's pages are on their way while this tile is attended to.
        ahead = next_keys(index, stop, block, C)
        if AHEAD and (not BOXED or C.source.is_paged):
            pages = pages_of(ahead, block, given, C)
        scores = score_tile(q, queries.rest, k, k_rest, C)
        key_scales = KEYS.scales(keys, at, k_places, DTYPE, K, C)
        if key_scales is not None:
            scores *= key_scales[:, None] if C.tiles.keys_first else key_scales[None, :]
        scores, scale = logits_of(
            scores, base_scale, units, index, at, tiles, queries, item, given, C
        )
        if ONE_TILE:
            v = k
            value_scales = key_scales
        else:
            if not C.tiles.values_first:
                v, v_places = VALUES.tile(values, at, 0, DV, DTYPE, V, C)
                if not BOXED:
                    pages = pages_of(ahead, block, given, C)
            value_scales = VALUES.scales(values, at, v_places, DTYPE, V, C)
        # Between scores and weights, where the sums of the tile before are waited for anyway.
        if C.division.closes_inside:  # noqa: SIM102 - one is known when compiling, the other is not
            if index == fold.end:
                state, fold = close_part(state, fold, queries, item, given, C)
        # The branch keeps the compiler from moving the update before the copies of the next tile.
        is_due = True
        if C.tiles.paired:
            is_due = index < stop
        if is_due:
            if C.tiles.lazy_peak:
                state = update_lazily(state, scores, scale, v, value_scales)
            else:
                state = update_state(state, scores, scale, v, value_scales, row_units, ORDER, C)
    return state, fold


@triton.jit
def score_tile(q, q_rest, k, k_rest, C: tl.constexpr):
    """Products of queries and keys."""
    scores = score(q, k, None, C.tiles.keys_first, C.source.k.words)
    if C.tiles.dk_rest > 0:
        if C.source.one_tile and C.tiles.block_m >= 64:
            # Chained, each warpgroup would compute the whole product; so add two products.
            scores = tl.fma(score(q_rest, k_rest, None, C.tiles.keys_first), 1.0, scores)
        else:
            scores = score(q_rest, k_rest, scores, C.tiles.keys_first)
    return scores


@triton.jit
def transpose_state(state, C: tl.constexpr):
    """A state as the loop over tiles has it: with keys_first acc is transposed, total a tile.

    With a lazy peak, total is spread over threads.
    """
    peak, total, acc = state
    if C.tiles.keys_first:
        first_key = tl.arange(0, C.tiles.block_n)[:, None] == 0
        total = tl.where(first_key, total[None, :], 0.0)
        if C.source.pairs:
            acc = permute_sums(acc)
        acc = tl.trans(acc)
    if C.tiles.lazy_peak:
        total = spread_total(total)
    return peak, total, acc


@triton.jit
def collect_state(state, queries, is_first, given, C: tl.constexpr):
    """A state as it was before `transpose_state`, with what is left to the end of a part.

    The one scale of codes is multiplied into the sum over all tiles; prior states, which the first
    part of a block goes on from, have none.
    """
    peak, total, acc = state
    if C.source.scales_sums:
        acc = acc * tl.load(given.view.v.scales.ptr)
    if C.tiles.keys_first:
        total = tl.sum(total, 0)
        acc = tl.trans(acc)
        if C.source.pairs:
            acc = restore_sums(acc)
    if C.tiles.lazy_peak:
        total = tl.sum(tl.sum(total, 2), 1)
    state = (peak, total, acc)
    if C.num_priors > 0 and C.source.scales_sums:
        mask = queries.inside & is_first
        state = resume(state, given.prior, queries.places, queries.heads, mask, C)
    return state


@triton.jit
def close_part(state, fold, queries, item, given, C: tl.constexpr):
    """Leave or merge a part whose last tile was attended to; what the next part begins with."""
    state = collect_state(state, queries, fold.part == 0, given, C)
    out, lse = finish_state(state)
    merges = keep_part(fold.merges, out, lse, fold.part, item, given.results.parts, C)
    state = transpose_state(empty_state(C.tiles.block_m, C.tiles.block_dv), C)
    return state, Fold(merges, fold.part + 1, fold.end + item.part_tiles)
