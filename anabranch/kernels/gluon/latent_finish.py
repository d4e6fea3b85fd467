"""The end of an item of latent keys: rows of a state, or of a part that waits for its merge.

Each consumer has half of the columns, and writes, leaves and merges them by itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from anabranch.kernels.gluon.barriers import (
    BOTH_AND_PRODUCER,
    BOTH_CONSUMERS,
    Q_FREE,
    SUMS_DONE,
    bar_arrive,
    bar_sync,
)
from anabranch.kernels.gluon.finish import store_columns
from anabranch.kernels.gluon.latent_copies import first_query
from anabranch.kernels.gluon.latent_merge import leave_latent_part
from anabranch.kernels.gluon.latent_rows import block_rows, store_lse
from anabranch.kernels.gluon.versions import store_box
from anabranch.kernels.schedule.walk import read_block, read_header
from anabranch.kernels.softmax.online_softmax import LN_2, pivot_of

COLUMNS = gl.constexpr(256)  # of a consumer


@gluon.jit
def finish_latent(
    acc,
    thread_totals,
    peak,
    ended,
    room,
    out_desc,
    given,
    spot,
    worker,
    C: gl.constexpr,
    HALF: gl.constexpr,
):
    """Write the columns of an item that has ended; peaks are in base 2."""
    block, results = ended.block, given.results
    staging = room.q[HALF].index(0)
    layout: gl.constexpr = peak.type.layout
    own = gl.convert_layout(gl.sum(thread_totals, 1), layout)
    room.sums.index(HALF).store(own)
    bar_sync(SUMS_DONE, BOTH_CONSUMERS)
    total = own + room.sums.index(1 - HALF).load(layout)
    lse = (pivot_of(peak) + gl.log2(total)) * LN_2
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    num_rows = block.q_len * C.work.group
    rows = gl.arange(0, 64, layout)
    left = gl.minimum(num_rows - block.first_row, 64)
    if ended.num_parts == 1:
        row = first_query(block, ended.kv_head, C)
        places = block_rows(rows, block, ended.kv_head, C)
        if HALF == 0:
            store_lse(lse, places, rows < left, results.lse, C)
        if left == 64:
            staging.store(out.to(staging.dtype))
            fence_async_shared()
            store_box(out_desc, [row, HALF * COLUMNS], staging)
            tma.store_wait(0)
        else:
            starts = places.to(gl.int64) * results.out.head + HALF * COLUMNS
            store_columns(out, results.out.ptr, starts, rows < left)
        bar_arrive(Q_FREE, BOTH_AND_PRODUCER)
    else:
        bar_arrive(Q_FREE, BOTH_AND_PRODUCER)
        leave_latent_part(out, lse, rows, left, ended, given, spot, worker, C, HALF)


@gluon.jit
def write_empty_blocks(
    worker, pack, given, o_layout: gl.constexpr, C: gl.constexpr, HALF: gl.constexpr
):
    """Write the blocks that see no keys: no worker's share leads there."""
    W: gl.constexpr = C.work
    NUM_WORKERS: gl.constexpr = W.division.num_workers
    outs = given.results.out
    header = read_header(given.order)
    if header.num_empty > 0:
        rows = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        for index in range(worker, header.num_blocks, NUM_WORKERS):
            block = read_block(given.order, index, W)
            if block.num_tiles == 0:
                inside = (block.first_row + rows < block.q_len * W.group) & (worker < NUM_WORKERS)
                places = block_rows(rows, block, pack, C)
                if HALF == 0:
                    empty = gl.full([64], -float("inf"), gl.float32, rows.type.layout)
                    store_lse(empty, places, inside, given.results.lse, C)
                zeros = gl.zeros([64, COLUMNS], outs.ptr.dtype.element_ty, o_layout)
                starts = places.to(gl.int64) * outs.head + HALF * COLUMNS
                store_columns(zeros, outs.ptr, starts, inside)
