"""The state of one block of query rows and one kv head over a range of key tiles."""

import triton
import triton.language as tl

from anabranch.kernels.triton.addressing import dim_ptrs, load_rows
from anabranch.kernels.triton.masks import seen_by_all
from anabranch.kernels.triton.online_softmax import empty_state, sink_state, spread_total
from anabranch.kernels.triton.resume import resume
from anabranch.kernels.triton.tiles import attend_tiles


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
    C: tl.constexpr,
):
    """The state of one block of rows over the tiles [tile, stop) of one kv head."""
    first_row, q_start = block
    _, q_len, seq_len, kv_head = pair
    rows = first_row + tl.arange(0, C.tiles.block_m)
    row_mask = rows < q_len * C.group
    tokens = rows // C.group
    heads = kv_head * C.group + rows % C.group
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
    # The one scale of codes is multiplied into the sum over all tiles; prior states have none.
    LATE: tl.constexpr = C.source.v_words and C.source.v_format.scaling == "tensor"
    if C.num_priors > 0 and not LATE:
        peak, total, acc = resume(
            (peak, total, acc), prior, q_start + tokens, heads, row_mask & is_first, C
        )
    if C.tiles.keys_first:
        first_key = tl.arange(0, C.tiles.block_n)[:, None] == 0
        total = tl.where(first_key, total[None, :], 0.0)
        acc = tl.trans(acc)
    if C.tiles.lazy_peak:
        total = spread_total(total)
    state = (peak, total, acc)

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
        state = attend_tiles(
            state, (q_main, q_rest), tokens, tree_rows, tile, boxed_stop, full_start, full_stop,
            pair, source, rules, tree_width, C, True,
        )  # fmt: skip
        tile = tl.maximum(tile, boxed_stop)
    has_tiles = tile < stop
    if C.division.uniform:
        has_tiles = True  # known to the compiler
    if has_tiles:
        state = attend_tiles(
            state, (q_main, q_rest), tokens, tree_rows, tile, stop, full_start, full_stop,
            pair, source, rules, tree_width, C, False,
        )  # fmt: skip
    peak, total, acc = state
    if C.tiles.keys_first:
        total = tl.sum(total, 0)
        acc = tl.trans(acc)
    if C.tiles.lazy_peak:
        total = tl.sum(tl.sum(total, 2), 1)
    if C.num_priors > 0 and LATE:
        peak, total, acc = resume(
            (peak, total, acc), prior, q_start + tokens, heads, row_mask & is_first, C
        )
    return peak, total, acc
