"""The producers: one warp copies queries and keys, one copies values, both by TMA.

A tile of contiguous keys is one box; of paged keys, one box for each page, into slices of the tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anabranch.kernels.gluon.barriers import (
    BOTH_AND_PRODUCER,
    BOTH_PRODUCERS,
    FIRST_KEYS,
    K_FREE,
    V_FREE,
    bar_arrive,
    bar_sync,
    lane,
    of_lane,
)
from anabranch.kernels.gluon.queue import (
    first_ticket,
    next_ticket,
    publish_ticket,
    reset_counter,
    take_turn,
)
from anabranch.kernels.gluon.versions import load_box
from anabranch.kernels.schedule.items import read_item


@gluon.jit
def tile_pages(tile, block, given, C: gl.constexpr):
    """The pages of a tile, one in each lane of the warp; those past the sequence repeat its last.

    One load and one register for all of them, so that the next tile's can be under way early.
    """
    if C.page_size:
        first = tile * C.block_n // C.page_size
        last = gl.maximum(block.seq_len - 1, 0) // C.page_size
        page = gl.maximum(gl.minimum(first + lane(), last), 0)
        table = given.table + block.origin.to(gl.int64) * given.table_stride
        return gl.load(table + page, mask=block.seq_len > 0, other=0)
    else:
        return block.origin


@gluon.jit
def copy_tile(desc, buffer, full, tile, pages, page_rows, column, C: gl.constexpr):
    """Copy a tile of keys or values; a page begins every `page_rows` rows."""
    if C.page_size >= C.block_n:
        row = of_lane(pages, 0) * page_rows + tile * C.block_n % C.page_size
        load_box(desc, [row, column], full, buffer)
    elif C.page_size:
        BOXES: gl.constexpr = C.boxes_a_tile
        for i in gl.static_range(BOXES):
            box = buffer.slice(i * C.page_size, C.page_size, 0)
            load_box(desc, [of_lane(pages, i) * page_rows, column], full, box)
    else:
        row = pages * page_rows + tile * C.block_n
        load_box(desc, [row, column], full, buffer)


@gluon.jit
def copy_columns(
    ring, boxes, slot, tile, pages, head, C: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr
):
    """Both column ranges of a tile, announced to the barrier of its slot."""
    full = ring.full.index(slot)
    mbarrier.expect(full, C.block_n * (MAIN + REST) * 2)
    column, rows = head * boxes.head_stride, boxes.page_rows
    copy_tile(boxes.main, ring.main.index(slot), full, tile, pages, rows, column, C)
    if REST:
        copy_tile(boxes.rest, ring.rest.index(slot), full, tile, pages, rows, column + MAIN, C)


@gluon.jit
def copy_queries(q, descs, taken, token, head, C: gl.constexpr):
    """The 64 rows of each consumer: tokens times the heads of a pack, in one box."""
    PACK: gl.constexpr = C.pack
    TOKENS: gl.constexpr = 64 // C.pack
    MAIN: gl.constexpr = C.dk_main
    REST: gl.constexpr = C.dk_rest
    for wg in gl.static_range(2):
        full = q.full.index(wg)
        mbarrier.wait(q.empty.index(wg), (taken & 1) ^ 1)
        mbarrier.expect(full, 64 * (MAIN + REST) * 2)
        main = q.main.index(wg).reshape((TOKENS, PACK, MAIN))
        load_box(descs[0], [token + wg * TOKENS, head, 0], full, main)
        if REST:
            rest = q.rest.index(wg).reshape((TOKENS, PACK, REST))
            load_box(descs[1], [token + wg * TOKENS, head, MAIN], full, rest)


@gluon.jit
def produce_queries_keys(q, k, q_descs, boxes, queue, counter_ptr, given, C: gl.constexpr):
    """Copy the queries of each item once, then its keys from the last tile to the first."""
    done = 0
    taken = 0
    turn = gl.program_id(0)
    ticket = first_ticket(given.order, C)
    while ticket >= 0:
        item, pack = ticket // C.num_packs, ticket % C.num_packs
        block = read_item(given.order, item)
        kv_head = pack // C.packs_per_kv
        token = block.q_start + block.first_row // C.pack
        turn = take_turn(counter_ptr)
        if C.frees_queries_early:
            copy_queries(q, q_descs, taken, token, pack * C.pack_heads, C)
        last_tile = block.first_tile + block.num_tiles - 1
        pages = tile_pages(last_tile, block, given, C)
        for count in range(0, block.num_tiles):
            tile = last_tile - count
            next_pages = tile_pages(tile - 1, block, given, C)
            slot = done % C.stages
            if done >= C.stages:
                bar_sync(K_FREE + slot, BOTH_AND_PRODUCER)
            copy_columns(k, boxes, slot, tile, pages, kv_head, C, C.dk_main, C.dk_rest)
            pages = next_pages
            done += 1
            if count == 0:  # the first copies are under way: time to look for the next item
                if not C.frees_queries_early:
                    copy_queries(q, q_descs, taken, token, pack * C.pack_heads, C)
                if taken == 0:
                    bar_arrive(FIRST_KEYS, BOTH_PRODUCERS)
                ticket = publish_ticket(queue, given.order, turn, taken, C)
        taken += 1
    reset_counter(given.order, counter_ptr, turn, C)


@gluon.jit
def produce_values(v, boxes, queue, given, C: gl.constexpr):
    """Copy the values of each item, from the last tile to the first.

    The very first come after queries and keys, which are needed before them.
    """
    done = 0
    taken = 0
    ticket = first_ticket(given.order, C)
    if ticket >= 0:
        bar_sync(FIRST_KEYS, BOTH_PRODUCERS)
    while ticket >= 0:
        item, pack = ticket // C.num_packs, ticket % C.num_packs
        block = read_item(given.order, item)
        kv_head = pack // C.packs_per_kv
        last_tile = block.first_tile + block.num_tiles - 1
        pages = tile_pages(last_tile, block, given, C)
        for count in range(0, block.num_tiles):
            tile = last_tile - count
            next_pages = tile_pages(tile - 1, block, given, C)
            slot = done % C.stages
            if done >= C.stages:
                bar_sync(V_FREE + slot, BOTH_AND_PRODUCER)
            copy_columns(v, boxes, slot, tile, pages, kv_head, C, C.dv_main, C.dv_rest)
            pages = next_pages
            done += 1
        ticket = next_ticket(queue, taken, 1)
        taken += 1
