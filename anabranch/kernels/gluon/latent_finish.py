"""The end of an item of latent keys: rows of a state, or of a part that somebody merges.

Each consumer has half of the columns, and writes, leaves and merges them by itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from anabranch.kernels.gluon.barriers import bar_arrive, bar_sync
from anabranch.kernels.gluon.finish import store_columns
from anabranch.kernels.gluon.latent_copies import (
    BOTH_AND_PRODUCER,
    Q_FREE,
    SUMS_DONE,
    first_query,
)
from anabranch.kernels.gluon.latent_merge import leave_part
from anabranch.kernels.gluon.latent_rows import block_rows, store_lse
from anabranch.kernels.gluon.versions import store_box
from anabranch.kernels.schedule.schedule_layout import read_block, read_header
from anabranch.kernels.softmax.online_softmax import LN_2, pivot_of

COLUMNS = gl.constexpr(256)  # of a consumer


@gluon.jit
def finish_latent(
    acc, thread_totals, peak, block, part, pack, sums, staging, out_desc, out_rows, lse_rows,
    parts, schedule_ptr, walk, worker, C: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Write the columns of an item that has ended; peaks are in base 2."""
    _, first_row, q_start, q_len, _ = block
    _, num_parts, _ = part
    layout: gl.constexpr = peak.type.layout
    own = gl.convert_layout(gl.sum(thread_totals, 1), layout)
    sums.index(HALF).store(own)
    bar_sync(SUMS_DONE, 256)
    total = own + sums.index(1 - HALF).load(layout)
    lse = (pivot_of(peak) + gl.log2(total)) * LN_2
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    out = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    num_rows = q_len * C.work.group
    rows = gl.arange(0, 64, layout)
    left = gl.minimum(num_rows - first_row, 64)
    if num_parts == 1:
        row = first_query(q_start, first_row, pack, C)
        places = block_rows(rows, first_row, q_start, pack, C)
        if HALF == 0:
            store_lse(lse, places, rows < left, lse_rows, C)
        if left == 64:
            staging.store(out.to(staging.dtype))
            fence_async_shared()
            store_box(out_desc, [row, HALF * COLUMNS], staging)
            tma.store_wait(0)
        else:
            starts = places.to(gl.int64) * out_rows.head + HALF * COLUMNS
            store_columns(out, out_rows.ptr, starts, rows < left)
        bar_arrive(Q_FREE, BOTH_AND_PRODUCER)
    else:
        bar_arrive(Q_FREE, BOTH_AND_PRODUCER)
        leave_part(
            out, lse, rows, left, first_row, q_start, part, pack, parts, out_rows, lse_rows,
            schedule_ptr, walk, worker, C, HALF,
        )  # fmt: skip


@gluon.jit
def write_empty_blocks(
    schedule_ptr, worker, pack, out_rows, lse_rows, o_layout: gl.constexpr, C: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Write the blocks that see no keys: no worker's share leads there."""
    W: gl.constexpr = C.work
    NUM_WORKERS: gl.constexpr = W.division.num_workers
    _, _, num_blocks, num_empty, _, _ = read_header(schedule_ptr)
    if num_empty > 0:
        rows = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
        for block in range(worker, num_blocks, NUM_WORKERS):
            _, first_row, q_start, q_len, _, _, num_tiles, _ = read_block(schedule_ptr, block, W)
            if num_tiles == 0:
                inside = (first_row + rows < q_len * W.group) & (worker < NUM_WORKERS)
                places = block_rows(rows, first_row, q_start, pack, C)
                if HALF == 0:
                    empty = gl.full([64], -float("inf"), gl.float32, rows.type.layout)
                    store_lse(empty, places, inside, lse_rows, C)
                zeros = gl.zeros([64, COLUMNS], out_rows.ptr.dtype.element_ty, o_layout)
                starts = places.to(gl.int64) * out_rows.head + HALF * COLUMNS
                store_columns(zeros, out_rows.ptr, starts, inside)
