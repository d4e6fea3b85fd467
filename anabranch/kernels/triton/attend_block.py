"""The state of one block of query rows and one kv head over a range of key tiles."""

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import dim_ptrs, load_rows
from anabranch.kernels.softmax.masks import seen_by_all
from anabranch.kernels.softmax.online_softmax import (
    empty_state,
    finish_merge,
    finish_state,
    sink_state,
)
from anabranch.kernels.triton.fixed_parts import (
    closes_inside,
    collect_state,
    empty_folds,
    keep_last,
    keep_part,
    transpose_state,
)
from anabranch.kernels.triton.prior_states import resume
from anabranch.kernels.triton.tile_loop import attend_tiles


@triton.jit
def attend_pair(
    q,  # Rows
    block,  # first_row, q_start
    pair,  # origin, q_len, seq_len, kv_head
    tile,
    stop,
    is_first,  # whether this is the first part of the pair, which also holds the sink
    source,  # ViewArguments, Boxes or None for each, the stride of the table
    rules,  # Rules
    tree_width,
    prior,  # PriorArguments or None
    held,  # as `attend_parts` takes it, or None
    C: tl.constexpr,
):
    """Attend to the tiles [tile, stop) of one kv head.

    The state of the last part there, and the merges of the parts before it.
    """
    first_row, q_start = block
    _, q_len, seq_len, kv_head = pair
    own = first_row + tl.arange(0, C.tiles.block_m)
    row_mask = own < q_len * C.group
    tokens = own // C.group
    heads = kv_head * C.group + own % C.group
    offsets = (q_start + tokens).to(tl.int64) * q.token + heads.to(tl.int64) * q.head
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
        tree_rows = rules.tree_mask + (q_start + own_tokens).to(tl.int64) * tree_width
    peak, total, acc = empty_state(C.tiles.block_m, C.tiles.block_dv)
    if rules.sinks is not None:
        logits = tl.load(rules.sinks + heads, row_mask & is_first, other=float("-inf"))
        peak, total = sink_state(logits.to(tl.float32))
    LATE: tl.constexpr = C.source.v_words and C.source.v_format.scaling == "tensor"
    if C.num_priors > 0 and not LATE:
        peak, total, acc = resume(
            (peak, total, acc), prior, q_start + tokens, heads, row_mask & is_first, C
        )
    state = transpose_state((peak, total, acc), C)
    fold = ()
    if closes_inside(C):
        part, _, _, size, _, _ = held
        fold = (empty_folds(C), part, tile + size)
    rows = (q_start + tokens, heads, row_mask)
    ending = (prior, rows, q_len * C.group - first_row)

    full_start = tile
    full_stop = tile
    if C.tiles.block_m >= 64:
        last_token = (tl.minimum(first_row + C.tiles.block_m, q_len * C.group) - 1) // C.group
        start, end = seen_by_all(
            first_row // C.group, last_token, q_len, seq_len,
            rules.window, rules.tree_mask, C.causal,
        )  # fmt: skip
        full_start = tl.cdiv(start, C.tiles.block_n)
        full_stop = end // C.tiles.block_n
    if source[1][0] is not None:
        boxed_stop = tl.minimum(seq_len // C.tiles.block_n, stop)
        state, fold = attend_tiles(
            state, fold, (q_main, q_rest), tokens, tree_rows, tile, boxed_stop, full_start,
            full_stop, pair, source, rules, tree_width, held, ending, C, True,
        )  # fmt: skip
        tile = tl.maximum(tile, boxed_stop)
    has_tiles = tile < stop
    if C.division.uniform:
        has_tiles = True  # known to the compiler
    if has_tiles:
        state, fold = attend_tiles(
            state, fold, (q_main, q_rest), tokens, tree_rows, tile, stop, full_start, full_stop,
            pair, source, rules, tree_width, held, ending, C, False,
        )  # fmt: skip
    merged = ()
    if closes_inside(C):
        merged, part, _ = fold
        is_first = part == 0
    return collect_state(state, source[0].v, prior, rows, is_first, C), merged


@triton.jit
def attend_parts(
    q, block, pair, tile, stop, source, rules, tree_width, prior,
    held,  # first part, count, parts of the block, tiles of each, first slot, Parts
    C: tl.constexpr,
):  # fmt: skip
    """Attend to fixed parts of a pair, the tiles [tile, stop): left in slots, or their merge."""
    part, count, _, size, _, _ = held
    first_row, _ = block
    _, q_len, _, kv_head = pair
    left = q_len * C.group - first_row
    if closes_inside(C):
        state, folds = attend_pair(
            q, block, pair, tile, stop, part == 0, source, rules, tree_width, prior, held, C
        )
        out, lse = finish_state(state)
        out, lse = keep_last(folds, out, lse, part + count - 1, held, left, kv_head, C)
    else:
        folds = empty_folds(C)
        for index in range(part, part + count):
            end = tl.minimum(tile + size, stop)
            ended = attend_pair(
                q, block, pair, tile, end, index == 0, source, rules, tree_width, prior, held, C
            )
            out, lse = finish_state(ended[0])
            folds = keep_part(folds, out, lse, index, held, left, kv_head, C)
            tile = end
        out, lse = finish_merge(folds[0])
    return out, lse
