"""The producer of latent tiles: one warp copies queries and rows by TMA.

A tile is two halves of 64 keys. Of a half, the left columns and the right ones with the rotary part
are announced and freed apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import (
    BOTH_AND_PRODUCER,
    CONSUMER_AND_PRODUCER,
    LEFT_FREE,
    Q_FREE,
    RIGHT_FREE,
    bar_sync,
)
from anabranch.kernels.gluon.copies import copy_tile, tile_pages
from anabranch.kernels.gluon.versions import load_box
from anabranch.kernels.schedule.walk import begin_share, take_item


@gluon.jit
def first_query(block, pack, C: gl.constexpr):
    """Where the rows of a block begin in [num_tokens * num_heads, ...]."""
    GROUP: gl.constexpr = C.work.group
    row = block.first_row // GROUP * C.num_heads + pack * GROUP + block.first_row % GROUP
    return block.q_start * C.num_heads + row


@gluon.jit
def copy_latent_queries(room, boxes, row):
    """The 64 rows of a block; their rotary columns lie where weights are left later."""
    full = room.q_full
    mbarrier.expect(full, 64 * 576 * 2)
    load_box(boxes.q, [row, 0], full, room.q[0].index(0))
    load_box(boxes.q, [row, 256], full, room.q[1].index(0))
    load_box(boxes.q_rest, [row, 512], full, room.p_odd)


@gluon.jit
def copy_half(room, boxes, half, pages, done, B: gl.constexpr, C: gl.constexpr):
    """The columns of half B of a tile, each part as soon as its room is free."""
    left, right, rest = room.k
    left_full, right_full = room.k_full[0].index(B), room.k_full[1].index(B)
    rows = boxes.page_rows
    if done > 0:
        bar_sync(LEFT_FREE + B, CONSUMER_AND_PRODUCER)
    mbarrier.expect(left_full, 64 * 256 * 2)
    copy_tile(boxes.k, left.index(B), left_full, half, pages, rows, 0, C)
    if done > 0:
        bar_sync(RIGHT_FREE + B, CONSUMER_AND_PRODUCER)
    mbarrier.expect(right_full, 64 * 320 * 2)
    copy_tile(boxes.k, right.index(B), right_full, half, pages, rows, 256, C)
    copy_tile(boxes.k_rest, rest.index(B), right_full, half, pages, rows, 512, C)


@gluon.jit
def produce_latent(room, boxes, given, C: gl.constexpr):
    """Copy the tiles of every item from the last to the first, and its queries."""
    W: gl.constexpr = C.work
    worker, pack = gl.program_id(0) // C.num_packs, gl.program_id(0) % C.num_packs
    done = 0  # tiles
    taken = 0  # items
    if C.overlap:
        gdc_wait()
    spot = begin_share(worker, given.order, W)
    spot, item = take_item(spot, worker, given.order, W)
    while item.tile < item.stop:
        row = first_query(item.block, pack, C)
        if taken == 0:  # while the page table is read
            copy_latent_queries(room, boxes, row)
        for count in range(0, item.stop - item.tile):
            tile = item.stop - 1 - count
            for half in gl.static_range(2):
                pages = tile_pages(2 * tile + half, item.block, given, C)
                copy_half(room, boxes, 2 * tile + half, pages, done, half, C)
            done += 1
            if (count == 0) & (taken > 0):  # keys come first: room for queries is free later
                bar_sync(Q_FREE, BOTH_AND_PRODUCER)
                copy_latent_queries(room, boxes, row)
        taken += 1
        spot, item = take_item(spot, worker, given.order, W)
