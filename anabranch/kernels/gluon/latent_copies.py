"""The producer of latent tiles: one warp copies queries and rows by TMA.

A tile is two halves of 64 keys. Of a half, the left columns and the right ones with the rotary part
are announced and freed apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import bar_sync
from anabranch.kernels.gluon.copies import copy_tile, tile_pages
from anabranch.kernels.gluon.versions import load_box
from anabranch.kernels.schedule.walk import begin_walk, take_item

# Named barriers; Triton takes those up to 5.
EVEN_DONE = gl.constexpr(6)  # the left consumer has left peaks and weights of the even half
ODD_DONE = gl.constexpr(7)  # the right one those of the odd half
L_FREE = gl.constexpr(8)  # and 9: left columns of a half
R_FREE = gl.constexpr(10)  # and 11: its right and rotary columns
SUMS_DONE = gl.constexpr(12)  # both consumers have left their sums
Q_FREE = gl.constexpr(13)
CONSUMER_AND_PRODUCER = gl.constexpr(160)  # threads
BOTH_AND_PRODUCER = gl.constexpr(288)


@gluon.jit
def first_query(q_start, first_row, pack, C: gl.constexpr):
    """Where the rows of a block begin in [num_tokens * num_heads, ...]."""
    GROUP: gl.constexpr = C.work.group
    row = first_row // GROUP * C.num_heads + pack * GROUP + first_row % GROUP
    return q_start * C.num_heads + row


@gluon.jit
def copy_latent_queries(q, p_odd, q_full, q_desc, rest_desc, row):
    """The 64 rows of a block; their rotary columns lie where weights will."""
    q_left, q_right = q
    mbarrier.expect(q_full, 64 * 576 * 2)
    load_box(q_desc, [row, 0], q_full, q_left.index(0))
    load_box(q_desc, [row, 256], q_full, q_right.index(0))
    load_box(rest_desc, [row, 512], q_full, p_odd)


@gluon.jit
def copy_half(k, full, k_desc, rest_desc, half, pages, page_rows, done, B: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """The columns of half B of a tile, each part as soon as its room is free."""
    left, right, rest = k
    full_left, full_right = full
    if done > 0:
        bar_sync(L_FREE + B, CONSUMER_AND_PRODUCER)
    mbarrier.expect(full_left.index(B), 64 * 256 * 2)
    copy_tile(k_desc, left.index(B), full_left.index(B), half, pages, page_rows, 0, C)
    if done > 0:
        bar_sync(R_FREE + B, CONSUMER_AND_PRODUCER)
    mbarrier.expect(full_right.index(B), 64 * 320 * 2)
    copy_tile(k_desc, right.index(B), full_right.index(B), half, pages, page_rows, 256, C)
    copy_tile(rest_desc, rest.index(B), full_right.index(B), half, pages, page_rows, 512, C)


@gluon.jit
def produce_latent(
    q, k, p_odd, full, q_full, q_desc, q_rest_desc, k_desc, k_rest_desc, page_rows, table_ptr,
    table_stride, schedule_ptr, C: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of every item from the last to the first, and its queries."""
    W: gl.constexpr = C.work
    worker, pack = gl.program_id(0) // C.num_packs, gl.program_id(0) % C.num_packs
    done = 0  # tiles
    taken = 0  # items
    if C.overlap:
        gdc_wait()
    walk = begin_walk(schedule_ptr, worker, W)
    walk, block, tiles, _ = take_item(schedule_ptr, walk, worker, W)
    while tiles[0] < tiles[1]:
        origin, first_row, q_start, _, seq_len = block
        first_tile, stop = tiles
        row = first_query(q_start, first_row, pack, C)
        if taken == 0:  # while the page table is read
            copy_latent_queries(q, p_odd, q_full, q_desc, q_rest_desc, row)
        for count in range(0, stop - first_tile):
            tile = stop - 1 - count
            for half in gl.static_range(2):
                pages = tile_pages(2 * tile + half, origin, seq_len, table_ptr, table_stride, C)
                copy_half(
                    k, full, k_desc, k_rest_desc, 2 * tile + half, pages, page_rows, done, half, C
                )
            done += 1
            if (count == 0) & (taken > 0):  # keys come first: room for queries is free later
                bar_sync(Q_FREE, BOTH_AND_PRODUCER)
                copy_latent_queries(q, p_odd, q_full, q_desc, q_rest_desc, row)
        taken += 1
        walk, block, tiles, _ = take_item(schedule_ptr, walk, worker, W)
