"""The loop over tiles of keys: load, score, logits, load, update."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import first_pages, next_keys, pages_of, place_tile
from anabranch.kernels.load.key_pairs import order_weights
from anabranch.kernels.load.loaders import Columns, column_ptrs, key_loader, value_loader
from anabranch.kernels.load.packed_codes import permute_dims, unit_of
from anabranch.kernels.softmax.logits import capped, capped_exactly, masked, score, weighted
from anabranch.kernels.softmax.online_softmax import LOG2_E, update_lazily, update_state
from anabranch.kernels.triton.fixed_parts import close_part, closes_inside


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
    KEYS: tl.constexpr = key_loader(C, BOXED)
    VALUES: tl.constexpr = value_loader(C, BOXED)
    K: tl.constexpr = C.source.k
    V: tl.constexpr = C.source.v
    ONE_TILE: tl.constexpr = C.source.one_tile  # of keys and values
    AHEAD: tl.constexpr = C.tiles.values_first or ONE_TILE  # pages are looked up before the scores
    DTYPE: tl.constexpr = queries.main.dtype
    DK: tl.constexpr = C.tiles.dk_main
    DV: tl.constexpr = C.tiles.block_dv
    q, units = queries.main, None
    if K.words:
        units, inverse = unit_of(tl.max(tl.abs(q).to(tl.float32), 1))
        q = (q.to(tl.float32) * inverse[:, None]).to(tl.float16)
        q = permute_dims(q, C.source.quads)
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
        if closes_inside(C):  # noqa: SIM102 - one is known when compiling, the other is not
            if index == fold.end:
                state, fold = close_part(state, fold, queries, item, given, C)
        # The branch keeps the compiler from moving the update before the copies of the next tile.
        is_due = True
        if C.tiles.paired:
            is_due = index < stop
        if is_due:
            state = update(state, scores, scale, v, value_scales, units, given, C)
    return state, fold


@triton.jit
def head_of(item, C: tl.constexpr):
    """The kv head whose keys an item reads."""
    kv_head = item.kv_head
    LIST_HEADS: tl.constexpr = C.source.list_heads
    if LIST_HEADS is not None:
        kv_head = item.block.origin % LIST_HEADS[0] * LIST_HEADS[1] // LIST_HEADS[0]
    if C.source.one_tile:
        kv_head *= 0  # there is one, which paired blocks of query heads read
    return kv_head


@triton.jit
def score_tile(q, q_rest, k, k_rest, C: tl.constexpr):
    """Products of queries and keys."""
    scores = score(q, k, None, C.tiles.keys_first)
    if C.tiles.dk_rest > 0:
        if C.source.one_tile and C.tiles.block_m >= 64:
            # Chained, each warpgroup would compute the whole product; so add two products.
            scores = tl.fma(score(q_rest, k_rest, None, C.tiles.keys_first), 1.0, scores)
        else:
            scores = score(q_rest, k_rest, scores, C.tiles.keys_first)
    return scores


@triton.jit
def logits_of(scores, scale, units, index, at, tiles, queries, item, given, C: tl.constexpr):
    """Scores after softcap, log-weights and mask; times the scale, they are logits in base 2."""
    block, rules, view = item.block, given.rules, given.view
    # Units of rows are multiplied into scores where these are not logits but for a scale.
    if C.source.k.words and (rules.softcap is not None or view.log_weights is not None):
        scores *= units[None, :] if C.tiles.keys_first else units[:, None]
    if rules.softcap is not None:
        if queries.main.dtype == tl.float32:
            scores = capped_exactly(scores, scale, rules.softcap)
        else:
            scores = capped(scores, scale, rules.softcap)
        scale = LOG2_E
    if view.log_weights is not None:
        keys = tl.minimum(at.keys, at.last)
        row = view.log_weights + block.origin.to(tl.int64) * given.table_stride
        scores = weighted(scores, scale, row + keys, C.tiles.keys_first)
        scale = LOG2_E
    is_edge = True  # a short block waits for memory and has time to mask every tile
    if C.tiles.block_m >= 64:
        is_edge = (index < tiles.full_start) | (index >= tiles.full_stop)
    if is_edge:
        scores = masked(scores, at.keys, queries, block, rules, given.tree_width, C)
    return scores, scale


@triton.jit
def update(state, scores, scale, v, value_scales, units, given, C: tl.constexpr):
    """Attend to one more tile."""
    V: tl.constexpr = C.source.v
    if C.tiles.lazy_peak:
        state = update_lazily(state, scores, scale, v, value_scales)
    else:
        UNITS_FIRST: tl.constexpr = (
            given.rules.softcap is not None or given.view.log_weights is not None
        )
        state = update_state(
            state,
            scores,
            scale,
            v,
            value_scales,
            None if UNITS_FIRST else units,
            V.words and V.format.scaling == "key",
            C.tiles.keys_first,
            order_weights if C.source.pairs else None,
        )
    return state
