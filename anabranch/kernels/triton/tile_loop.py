"""The state of one block of query rows over a range of key tiles."""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import (
    bounded,
    dim_ptrs,
    key_offsets,
    load_tile,
    pages_of,
)
from anabranch.kernels.load.key_pairs import (
    load_key_pairs,
    load_pair_scales,
    load_value_pairs,
    order_weights,
    pair_rows,
)
from anabranch.kernels.load.packed_codes import load_words, permute_dims, unit_of
from anabranch.kernels.load.scales import (
    load_folded,
    scale_offsets,
    scaled_as_tile,
    scaled_by_key,
)
from anabranch.kernels.softmax.logits import capped, capped_exactly, masked, score, weighted
from anabranch.kernels.softmax.online_softmax import LOG2_E, update_lazily, update_state
from anabranch.kernels.triton.fixed_parts import close_part, closes_inside


@triton.jit
def attend_tiles(
    state,
    fold,  # of fixed parts, as `close_part` takes it
    q,  # [block_m, dk_main] and [block_m, dk_rest]
    tokens,  # [block_m], counted in the sequence
    tree_rows,  # pointers [block_m] or None
    tile,
    stop,
    full_start,
    full_stop,
    pair,  # origin, q_len, seq_len, kv_head
    source,  # ViewArguments, Boxes or None for each, the stride of the table
    rules,  # Rules
    tree_width,
    held,  # as `attend_parts` takes it
    ending,  # what `close_part` takes beside: prior, rows, the number of these
    C: tl.constexpr,
    BOXED: tl.constexpr,
):
    """Attend to the tiles [tile, stop); every token sees all keys of [full_start, full_stop).

    The state of the last part, and what is folded of the parts before. BOXED tiles lie wholly
    inside the sequence, and the tensor memory accelerator copies them.
    """
    origin, q_len, seq_len, kv_head = pair
    view, boxes, table_stride = source
    K_WORDS: tl.constexpr = C.source.k_words
    V_WORDS: tl.constexpr = C.source.v_words
    PAIRS: tl.constexpr = C.source.pairs
    row_units = None
    q_main, q_rest = q
    if K_WORDS:
        row_units, inverse = unit_of(tl.max(tl.abs(q_main).to(tl.float32), 1))
        q_main = (q_main.to(tl.float32) * inverse[:, None]).to(tl.float16)
        q_main = permute_dims(q_main, PAIRS)
    k, v, table = view.k, view.v, view.table
    SHARED: tl.constexpr = C.source.values_in_keys
    K_FORMAT: tl.constexpr = C.source.k_format
    V_FORMAT: tl.constexpr = C.source.v_format
    K_STRIDES: tl.constexpr = C.source.k_scale_strides
    V_STRIDES: tl.constexpr = C.source.v_scale_strides
    DTYPE: tl.constexpr = q[0].dtype
    V_SCALED: tl.constexpr = not V_WORDS and scaled_as_tile(V_FORMAT, True, DTYPE)
    K_SCALED: tl.constexpr = not K_WORDS and scaled_as_tile(K_FORMAT, SHARED, DTYPE)
    K_BY_KEY: tl.constexpr = scaled_by_key(K_FORMAT, K_WORDS, K_SCALED)
    V_BY_KEY: tl.constexpr = scaled_by_key(V_FORMAT, V_WORDS, V_SCALED)
    base_scale = rules.scale
    if K_WORDS and K_FORMAT.scaling == "tensor":
        base_scale *= tl.load(k.scales.ptr)
    # Units of rows are multiplied into scores where these are not logits but for a scale.
    UNITS_FIRST: tl.constexpr = rules.softcap is not None or view.log_weights is not None
    LIST_HEADS: tl.constexpr = C.source.list_heads
    if LIST_HEADS is not None:
        kv_head = origin % LIST_HEADS[0] * LIST_HEADS[1] // LIST_HEADS[0]
    if SHARED:
        kv_head *= 0  # there is one, which paired blocks of query heads read
    k_ptr = k.ptr + kv_head.to(tl.int64) * k.head
    k_ptrs = dim_ptrs(k_ptr, k.dim, 0, C.tiles.dk_main)
    rest_ptrs = k_ptrs  # unused without a rest
    if C.tiles.dk_rest > 0:
        rest_ptrs = dim_ptrs(k_ptr, k.dim, C.tiles.dk_main, C.tiles.dk_rest)
    v_ptrs = dim_ptrs(v.ptr + kv_head.to(tl.int64) * v.head, v.dim, 0, C.tiles.block_dv)
    if C.source.page_strides is not None:
        k_page, k_key = C.source.page_strides[0], C.source.page_strides[1]
        v_page, v_key = C.source.page_strides[2], C.source.page_strides[3]
    else:
        k_page, k_key, v_page, v_key = k.page, k.key, v.page, v.key
    PAGED_BOXES: tl.constexpr = BOXED and table is not None
    if BOXED and not PAGED_BOXES:
        box_row = origin * (k.page // k.key)
    # Keys after the last one read it again, masked: a clamp costs less than a masked copy.
    # A tile that lies in one page looks up that page, and others a page for each key.
    ONE_PAGE: tl.constexpr = not C.source.is_plain and C.source.page_size % C.tiles.block_n == 0
    if ONE_PAGE:
        first_keys = tile * C.tiles.block_n
    elif PAIRS:
        evens = tl.arange(0, C.tiles.block_n // 2) * 2
        first_keys = tile * C.tiles.block_n + evens
    else:
        keys = tile * C.tiles.block_n + tl.arange(0, C.tiles.block_n)
        first_keys = keys
    if C.source.lists is None:  # a list is read before its length is known
        first_keys = tl.minimum(first_keys, seq_len - 1)
    pages = pages_of(first_keys, origin, seq_len, view, table_stride, C)
    last = seq_len - 1
    if PAIRS:
        evens = tl.arange(0, C.tiles.block_n // 2) * 2
    for index in tl.range(tile, stop):
        if PAIRS:
            keys = index * C.tiles.block_n + pair_rows(C.tiles.block_n)
            even_keys = index * C.tiles.block_n + evens
        else:
            keys = index * C.tiles.block_n + tl.arange(0, C.tiles.block_n)
        # Loading V before K moves the barrier that the compiler puts between the copies of two
        # tiles: it stands between iterations, and not between scores and softmax.
        if PAGED_BOXES:
            place = pages * C.source.page_size + index * C.tiles.block_n % C.source.page_size
        elif BOXED:
            place = box_row + index * C.tiles.block_n
        else:
            safe_keys = tl.minimum(keys, seq_len - 1)
        if C.tiles.values_first and not SHARED:
            v_scale_place = keys  # unused without scales
            if not BOXED:
                place = key_offsets(safe_keys, pages, v_page, v_key, table, C)
                v_scale_place = scale_offsets(
                    v, V_STRIDES, safe_keys, pages, kv_head, table, V_FORMAT, C
                )
            tile_v = load_tile(
                v, boxes[2], v_ptrs, place, v_scale_place, kv_head, 0, C.tiles.block_dv,
                C.head_dim_v, DTYPE, V_FORMAT, V_SCALED, BOXED,
            )  # fmt: skip
        k_scale_place = keys  # unused without scales
        if not BOXED and not PAIRS:
            place = key_offsets(safe_keys, pages, k_page, k_key, table, C)
            k_scale_place = scale_offsets(
                k, K_STRIDES, safe_keys, pages, kv_head, table, K_FORMAT, C
            )
        scale = base_scale
        if PAIRS:
            tile_k = load_key_pairs(
                k, even_keys, last, pages, k_page, k_key, kv_head, table, K_FORMAT, C
            )
        elif K_WORDS:
            tile_k = load_words(
                k, safe_keys, pages, k_page, k_key, kv_head, k_scale_place, table,
                C.tiles.dk_main, K_FORMAT, True, C,
            )  # fmt: skip
        else:
            tile_k = load_tile(
                k, boxes[0], k_ptrs, place, k_scale_place, kv_head, 0, C.tiles.dk_main,
                C.head_dim_k, DTYPE, K_FORMAT, K_SCALED, BOXED,
            )  # fmt: skip
        rest_k = tile_k  # unused without a rest
        if C.tiles.dk_rest > 0:
            rest_k = load_tile(
                k, boxes[1], rest_ptrs, place, k_scale_place, kv_head, C.tiles.dk_main,
                C.tiles.dk_rest, C.head_dim_k, DTYPE, K_FORMAT, K_SCALED, BOXED,
            )  # fmt: skip
        if not BOXED or PAGED_BOXES:
            # The next tile's pages are on their way while this tile is attended to.
            next_keys = (even_keys if PAIRS else keys) + C.tiles.block_n
            if ONE_PAGE:
                next_keys = (index + 1) * C.tiles.block_n
            next_keys = bounded(next_keys, stop, seq_len, C)
            if C.tiles.values_first or SHARED:
                pages = pages_of(next_keys, origin, seq_len, view, table_stride, C)
        scores = score(q_main, tile_k, None, C.tiles.keys_first)
        if C.tiles.dk_rest > 0:
            if SHARED and C.tiles.block_m >= 64:
                # As a sum of two products: every warpgroup would compute all of one that adds to
                # the other.
                scores = tl.fma(score(q_rest, rest_k, None, C.tiles.keys_first), 1.0, scores)
            else:
                scores = score(q_rest, rest_k, scores, C.tiles.keys_first)
        if PAIRS:
            key_scales = load_pair_scales(
                k, K_STRIDES, even_keys, last, pages, kv_head, table, K_BY_KEY, C
            )
        else:
            key_scales = load_folded(k, k_scale_place, K_BY_KEY)
        if key_scales is not None:
            scores *= key_scales[:, None] if C.tiles.keys_first else key_scales[None, :]
        if K_WORDS and UNITS_FIRST:
            scores *= row_units[None, :] if C.tiles.keys_first else row_units[:, None]
        if rules.softcap is not None:
            if q[0].dtype == tl.float32:
                scores = capped_exactly(scores, scale, rules.softcap)
            else:
                scores = capped(scores, scale, rules.softcap)
            scale = LOG2_E
        if view.log_weights is not None:
            safe_keys = tl.minimum(keys, seq_len - 1)
            scores = weighted(
                scores, scale, safe_keys, origin, view.log_weights, table_stride,
                C.tiles.keys_first,
            )  # fmt: skip
            scale = LOG2_E
        is_edge = True  # a short block waits for memory and has time to mask every tile
        if C.tiles.block_m >= 64:
            is_edge = (index < full_start) | (index >= full_stop)
        if is_edge:
            scores = masked(
                scores, keys, tokens, tree_rows, q_len, seq_len, rules.window, tree_width, C
            )
        if SHARED:
            tile_v = tile_k
            value_scales = key_scales
        else:
            if not C.tiles.values_first:
                v_scale_place = keys  # unused without scales
                if not BOXED and not PAIRS:
                    place = key_offsets(safe_keys, pages, v_page, v_key, table, C)
                    v_scale_place = scale_offsets(
                        v, V_STRIDES, safe_keys, pages, kv_head, table, V_FORMAT, C
                    )
                if PAIRS:
                    tile_v = load_value_pairs(
                        v, even_keys, last, pages, v_page, v_key, kv_head, table, V_FORMAT, C,
                    )  # fmt: skip
                    value_scales = load_pair_scales(
                        v, V_STRIDES, even_keys, last, pages, kv_head, table, V_BY_KEY, C
                    )
                    if V_BY_KEY:
                        value_scales = tl.where(keys <= last, value_scales, 0.0)
                elif V_WORDS:
                    tile_v = load_words(
                        v, safe_keys, pages, v_page, v_key, kv_head, v_scale_place, table,
                        C.tiles.block_dv, V_FORMAT, False, C,
                    )  # fmt: skip
                else:
                    tile_v = load_tile(
                        v, boxes[2], v_ptrs, place, v_scale_place, kv_head, 0, C.tiles.block_dv,
                        C.head_dim_v, DTYPE, V_FORMAT, V_SCALED, BOXED,
                    )  # fmt: skip
                if not BOXED:
                    pages = pages_of(next_keys, origin, seq_len, view, table_stride, C)
            if not PAIRS:
                value_scales = load_folded(v, v_scale_place, V_BY_KEY)
        # Between scores and weights, where the sums of the tile before are waited for anyway.
        if closes_inside(C):  # noqa: SIM102 - one is known when compiling, the other is not
            if index == fold[2]:
                prior, rows, left = ending
                state, fold = close_part(state, fold, held, v, prior, rows, left, pair[3], C)
        # What stands under a condition is left after the copies of the next tile.
        is_due = True
        if C.tiles.paired:
            is_due = index < stop
        if is_due:
            if C.tiles.lazy_peak:
                state = update_lazily(state, scores, scale, tile_v, value_scales)
            else:
                state = update_state(
                    state, scores, scale, tile_v, value_scales, None if UNITS_FIRST else row_units,
                    V_WORDS and V_BY_KEY, C.tiles.keys_first, order_weights if PAIRS else None,
                )  # fmt: skip
    return state, fold
