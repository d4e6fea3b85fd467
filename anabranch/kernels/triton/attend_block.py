"""The state of one block of query rows and one kv head over a range of key tiles."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels.load.addressing import dim_ptrs, load_rows
from anabranch.kernels.schedule.walk import Item
from anabranch.kernels.softmax.masks import seen_by_all
from anabranch.kernels.softmax.online_softmax import (
    empty_state,
    finish_merge,
    finish_state,
    sink_state,
)
from anabranch.kernels.triton.fixed_parts import (
    Fold,
    closes_inside,
    collect_state,
    empty_merges,
    keep_last,
    keep_part,
    transpose_state,
)
from anabranch.kernels.triton.prior_states import resume
from anabranch.kernels.triton.tile_loop import QueryRows, TileRange, attend_tiles


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
    if closes_inside(C):
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
    if closes_inside(C):
        merges = fold.merges
        is_first = fold.part == 0
    return collect_state(state, queries, is_first, given, C), merges


@triton.jit
def attend_parts(item, given, C: tl.constexpr):
    """Attend to the fixed parts of an item: left in slots, or their merge."""
    parts = given.results.parts
    if closes_inside(C):
        state, merges = attend_block(item, item.part == 0, given, C)
        out, lse = finish_state(state)
        out, lse = keep_last(merges, out, lse, item.part + item.count - 1, item, parts, C)
    else:
        merges = empty_merges(C)
        tile = item.tile
        for index in range(item.part, item.part + item.count):
            end = tl.minimum(tile + item.part_tiles, item.stop)
            state, _ = attend_block(with_tiles(item, tile, end), index == 0, given, C)
            out, lse = finish_state(state)
            merges = keep_part(merges, out, lse, index, item, parts, C)
            tile = end
        out, lse = finish_merge(merges[0])
    return out, lse


@triton.jit
def with_tiles(item, tile, stop):
    """The item with other tiles."""
    return Item(
        item.block,
        item.kv_head,
        tile,
        stop,
        item.part,
        item.count,
        item.num_parts,
        item.part_tiles,
        item.first_slot,
    )
