"""The merge of latent parts: workers that have nothing else to do share the rows of a block.

Whoever leaves a part counts it. The last one takes turns at rows until none are left; others that
have reached the end of their shares stay for a while, and take turns too once all parts are there.
Nobody depends on them: a worker that is last merges alone if it must.

The columns of a block have two counters: parts that are there, with turns taken in the upper half,
and workers that are gone, of whom the last resets both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anabranch.kernels.gluon.barriers import uniform
from anabranch.kernels.gluon.finish import store_columns
from anabranch.kernels.gluon.latent_rows import block_rows, store_lse
from anabranch.kernels.gluon.versions import thread_barrier
from anabranch.kernels.parts.slots import slot_of
from anabranch.kernels.schedule.walk import take_item
from anabranch.kernels.softmax.online_softmax import finish_merge, merge_part

COLUMNS = gl.constexpr(256)  # of a consumer
TURN = gl.constexpr(1 << 16)
# A turn has many rows of few parts or few rows of many: enough loads under way either way, and
# about as many turns as there are workers.
FEW_PARTS = gl.constexpr(4)
ROWS_OF_FEW = gl.constexpr(16)
ROWS_OF_MANY = gl.constexpr(4)

# 64 rows as a matrix product holds them, its columns gathered.
GATHERED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)


@gluon.jit
def count_at(counter, amount):
    """Add to a counter of all workers; what it was."""
    return uniform(gl.atomic_add(counter, amount, sem="acq_rel", scope="gpu"))


@gluon.jit
def gather_columns(x):
    """Columns of a matrix product in another order: a thread's next to each other, by four."""
    x = x.reshape([64, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, COLUMNS])
    return gl.convert_layout(x, GATHERED, assert_trivial=True)


@gluon.jit
def spread_columns(x):
    """The columns that `gather_columns` has put into another order, as they were."""
    ROWS: gl.constexpr = x.shape[0]
    x = x.reshape([ROWS, COLUMNS // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4))
    return x.reshape([ROWS, COLUMNS])


@gluon.jit
def leave_part(
    out, lse, rows, left, first_row, q_start, part, pack, parts, out_rows, lse_rows, schedule_ptr,
    walk, worker, C: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Leave the rows of a part, and merge some of the block's if all parts are there."""
    index, num_parts, first_slot = part
    outs_ptr, lses_ptr, counters_ptr = parts
    W: gl.constexpr = C.work
    places = (slot_of(index, first_slot, pack, W) * 2 + HALF) * 64 + rows
    gl.store(lses_ptr + places, lse, rows < left)
    store_columns(gather_columns(out), outs_ptr, places * COLUMNS, rows < left)
    _, _, ahead, _ = take_item(schedule_ptr, walk, worker, W)
    patience = gl.where(ahead[0] < ahead[1], 0, C.tiles.merge_patience)
    counter = counters_ptr + (slot_of(index * 0, first_slot, pack, W) * 2 + HALF) * 2
    thread_barrier()  # every warp's stores come before the release below
    present = count_at(counter, 1) + 1
    while (present < num_parts) & (patience > 0):
        present = count_at(counter, 0) % TURN
        patience -= 1
    if present == num_parts:
        if num_parts <= FEW_PARTS:
            take_turns(
                counter, left, first_row, q_start, num_parts, first_slot, pack, parts, out_rows,
                lse_rows, C, HALF, ROWS_OF_FEW, FEW_PARTS,
            )  # fmt: skip
        else:
            take_turns(
                counter, left, first_row, q_start, num_parts, first_slot, pack, parts, out_rows,
                lse_rows, C, HALF, ROWS_OF_MANY, C.tiles.merge_batch,
            )  # fmt: skip
    if count_at(counter + 1, 1) == num_parts - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def take_turns(
    counter, left, first_row, q_start, num_parts, first_slot, pack, parts, out_rows, lse_rows,
    C: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Merge ROWS rows at a turn, until others have taken the rest."""
    row = count_at(counter, TURN) // TURN * ROWS
    while row < left:
        merge_latent_rows(
            row, left, first_row, q_start, num_parts, first_slot, pack, parts, out_rows, lse_rows,
            C, HALF, ROWS, BATCH,
        )  # fmt: skip
        row = count_at(counter, TURN) // TURN * ROWS


@gluon.jit
def merge_latent_rows(
    row, stop, first_row, q_start, num_parts, first_slot, pack, parts, out_rows, lse_rows,
    C: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Merge some rows of all parts, in the order of their keys, and write them.

    Loads pass by the L1 cache: other processors wrote the parts.
    """
    outs_ptr, lses_ptr, _ = parts
    W: gl.constexpr = C.work
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = row + gl.arange(0, ROWS, row_layout)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    peak = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    merged = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for part in range(0, num_parts, BATCH):
        outs = ()
        lses = ()
        for i in gl.static_range(BATCH):
            present = (rows < stop) & (part + i < num_parts)
            places = (slot_of(part + i, first_slot, pack, W) * 2 + HALF) * 64 + rows
            lse = gl.load(lses_ptr + places, present, other=-float("inf"), cache_modifier=".cg")
            ptrs = outs_ptr + (places * COLUMNS)[:, None] + columns
            out = gl.load(ptrs, present[:, None], other=0.0, cache_modifier=".cg")
            outs = outs + (out,)  # noqa: RUF005 (the kernel language has no unpacking)
            lses = lses + (lse,)  # noqa: RUF005
        for i in gl.static_range(BATCH):
            peak, total, merged = merge_part((peak, total, merged), outs[i], lses[i])
    out, lse = finish_merge((peak, total, merged))
    places = block_rows(rows, first_row, q_start, pack, C)
    if HALF == 0:
        store_lse(lse, places, rows < stop, lse_rows, C)
    starts = places.to(gl.int64) * out_rows.head + HALF * COLUMNS
    store_columns(spread_columns(out), out_rows.ptr, starts, rows < stop)
