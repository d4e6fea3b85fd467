"""The producer of the product of experts: it finds tiles and copies their operands.

Weights come by TMA. So do rows that lie in the order of experts; others are gathered, 16 bytes a
thread at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anabranch.kernels.gluon.barriers import bar_sync, make_barriers, uniform
from anabranch.kernels.gluon.versions import load_box, load_shared
from anabranch.kernels.layers import expert_config
from anabranch.kernels.layers.expert_product import find_tile

TILE_FREE = gl.constexpr(8)  # to 15: named barriers of the stages; Triton takes those up to 5
BLOCK_M = gl.constexpr(expert_config.BLOCK_M)
OUTSIDE = gl.constexpr(1 << 30)  # a row that no matrix has


@gluon.jit
def make_tile_queue():
    """(tiles, ready, taken): two places of (start, stop, column), read by both consumers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [2, 4], layout)
    return tiles, make_barriers(2, 1), make_barriers(2, 2)


@gluon.jit
def publish_tile(queue, start, stop, column, count, C: gl.constexpr):
    """Hand a tile to the consumers; the last has no rows."""
    tiles, ready, taken = queue
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [C.producer_warps], [0])
    fields = gl.arange(0, 4, layout)
    tile = gl.where(fields == 0, start, gl.where(fields == 1, stop, column))
    mbarrier.wait(taken.index(count % 2), ((count // 2) & 1) ^ 1)
    tiles.index(count % 2).store(tile)
    mbarrier.arrive(ready.index(count % 2))


@gluon.jit
def next_tile(queue, count):
    """(start, stop, column) of the tile that the producer published."""
    tiles, ready, taken = queue
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    mbarrier.wait(ready.index(count % 2), (count // 2) & 1)
    tile = tiles.index(count % 2).load(layout)
    fields = gl.arange(0, 4, layout)
    start = uniform(gl.sum(gl.where(fields == 0, tile, 0), 0))
    stop = uniform(gl.sum(gl.where(fields == 1, tile, 0), 0))
    column = uniform(gl.sum(gl.where(fields == 2, tile, 0), 0))
    mbarrier.arrive(taken.index(count % 2))
    return start, stop, column


@gluon.jit
def take_tile(ticket, starts_ptr, num_experts, num_columns, C: gl.constexpr):
    """(expert, start, stop, column) of a ticket; tiles that share rows or weights are close."""
    # Every warp holds all experts, so that no sum needs shared memory.
    layout: gl.constexpr = gl.BlockedLayout([C.experts // 32], [32], [C.producer_warps], [0])
    experts = gl.arange(0, C.experts, layout)
    return find_tile(starts_ptr, ticket, experts, num_experts, num_columns, BLOCK_M)


@gluon.jit
def copy_weights(desc, buffer, full, expert, column, n, step, C: gl.constexpr):
    """One stage of weights: of outputs, or of the gates and then the ups of half as many."""
    first = step * C.block_k
    if C.gated:
        HALF: gl.constexpr = C.block_n // 2
        row = expert * 2 * n + column * HALF
        load_box(desc, [row, first], full, buffer.slice(0, HALF, 0))
        up = buffer.slice(HALF, HALF, 0)
        load_box(desc, [row + n, first], full, up)
    else:
        row = expert * n + column * C.block_n
        load_box(desc, [row, first], full, buffer)


@gluon.jit
def row_pointers(x_ptr, x_stride, order_ptr, start, stop, C: gl.constexpr):
    """Where the rows of each consumer begin; rows past the last repeat it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [C.producer_warps, 1], [1, 0])
    dims = gl.arange(0, C.block_k, gl.SliceLayout(0, layout))[None, :]
    pointers = ()
    for wg in gl.static_range(2):
        places = start + wg * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        rows = gl.load(order_ptr + gl.minimum(places, stop - 1)) // C.top_k
        offsets = (rows * x_stride).to(gl.int64)[:, None] * 8
        pointers = pointers + (x_ptr + offsets + dims,)  # noqa: RUF005 (no unpacking in kernels)
    return pointers


@gluon.jit
def gather_rows(pointers, x, full, slot, num_rows, step, k, C: gl.constexpr):
    """One stage of the rows of each consumer that has any, from the tokens they belong to."""
    layout: gl.constexpr = gl.SliceLayout(0, pointers[0].type.layout)
    octets = step * C.block_k // 8 + gl.arange(0, C.block_k, layout) // 8
    inside = (octets < k // 8)[None, :]  # 8 columns together, since they divide k
    for wg in gl.static_range(2):
        buffer = x.index(2 * slot + wg)
        source = pointers[wg] + step * C.block_k
        if num_rows > wg * 64:
            if C.even:
                load_shared(buffer, source)
            else:
                load_shared(buffer, source, mask=inside)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_rows(desc, x, full, slot, start, stop, step, C: gl.constexpr):
    """One stage of the rows of both consumers.

    A box may hold rows of the next expert, which are not written. A consumer without rows gets a
    box outside of the matrix, which is not read.
    """
    for wg in gl.static_range(2):
        buffer = x.index(2 * slot + wg)
        row = start + wg * 64
        row = gl.where(row < stop, row, OUTSIDE)
        load_box(desc, [row, step * C.block_k], full, buffer)


@gluon.jit
def produce_tiles(operands, source, n, k, num_experts, C: gl.constexpr):
    """Copy the operands of one tile after another, until no ticket has rows."""
    x, w, full, queue = operands
    x_desc, x_ptr, x_stride, w_desc, order_ptr, starts_ptr, counter_ptr = source
    num_columns = (n + C.columns - 1) // C.columns
    num_steps = (k + C.block_k - 1) // C.block_k
    done = 0  # stages copied
    count = 0  # tiles
    tile = take_tile(gl.program_id(0), starts_ptr, num_experts, num_columns, C)
    while tile[1] < tile[2]:
        expert, start, stop, column = tile
        publish_tile(queue, start, stop, column, count, C)
        ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
        if C.gathers:
            pointers = row_pointers(x_ptr, x_stride, order_ptr, start, stop, C)
        for step in range(0, num_steps):
            slot = done % C.stages
            if done >= C.stages:
                bar_sync(TILE_FREE + slot, C.threads)
            bar = full.index(slot)
            mbarrier.expect(bar, C.box_bytes)
            copy_weights(w_desc, w.index(slot), bar, expert, column, n, step, C)
            if C.gathers:
                gather_rows(pointers, x, bar, slot, stop - start, step, k, C)
            else:
                copy_rows(x_desc, x, bar, slot, start, stop, step, C)
            done += 1
            if step == num_steps // 2:  # the stages ahead hide that it takes a microsecond
                tile = take_tile(ticket, starts_ptr, num_experts, num_columns, C)
        count += 1
    publish_tile(queue, 0, 0, 0, count, C)
