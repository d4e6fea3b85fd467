"""The merge of latent parts: workers that have nothing else to do share the rows of a block.

A worker counts the part that it leaves. The last one takes turns at rows until none are left;
others that have reached the end of their shares stay for a while, and take turns too once all parts
are there. No worker depends on them: the last one merges alone if it must.

The columns of a block have two counters: parts that are there, with turns taken in the upper half,
and workers that are gone, of whom the last resets both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anabranch.kernels.gluon.barriers import uniform
from anabranch.kernels.gluon.finish import store_columns
from anabranch.kernels.gluon.latent_rows import block_rows, store_lse
from anabranch.kernels.gluon.versions import MERGES_TWO, thread_barrier
from anabranch.kernels.parts.join import merge_slots
from anabranch.kernels.parts.slots import slot_of
from anabranch.kernels.schedule.walk import take_item

COLUMNS = gl.constexpr(256)  # of a consumer
TURN = gl.constexpr(1 << 16)
# A turn has many rows of few parts or few rows of many: enough loads under way either way, and
# about as many turns as there are workers.
TWO_PARTS = gl.constexpr(2)
ROWS_OF_TWO = gl.constexpr(32)
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
def rows_of_half(part, rows, item, C: gl.constexpr):
    """Where rows of a consumer's half of a part wait (int64)."""
    W: gl.constexpr = C.work
    return (slot_of(part, item.first_slot, item.kv_head, W) * 2 + item.half) * 64 + rows


@gluon.jit
def leave_latent_part(
    out, lse, rows, left, ended, given, spot, worker, C: gl.constexpr, HALF: gl.constexpr
):
    """Leave the rows of a part, and merge some of the block's if all parts are there."""
    W: gl.constexpr = C.work
    num_parts, parts = ended.num_parts, given.results.parts
    places = rows_of_half(ended.part, rows, ended, C)
    gl.store(parts.lses + places, lse, rows < left)
    store_columns(gather_columns(out), parts.outs, places * COLUMNS, rows < left)
    _, ahead = take_item(spot, worker, given.order, W)
    patience = gl.where(ahead.tile < ahead.stop, 0, C.tiles.merge_patience)
    slot = slot_of(ended.part * 0, ended.first_slot, ended.kv_head, W)
    counter = parts.counters + (slot * 2 + HALF) * 2
    thread_barrier()  # every warp's stores come before the release below
    present = count_at(counter, 1) + 1
    while (present < num_parts) & (patience > 0):
        present = count_at(counter, 0) % TURN
        patience -= 1
    if present == num_parts:
        if not MERGES_TWO:
            take_any_turns(counter, left, ended, given.results, C, HALF)
        elif num_parts == TWO_PARTS:
            take_turns(counter, left, ended, given.results, C, HALF, ROWS_OF_TWO, TWO_PARTS)
        else:
            take_any_turns(counter, left, ended, given.results, C, HALF)
    if count_at(counter + 1, 1) == num_parts - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def take_any_turns(counter, left, ended, results, C: gl.constexpr, HALF: gl.constexpr):
    """Merge rows of few parts, or of many."""
    if ended.num_parts <= FEW_PARTS:
        take_turns(counter, left, ended, results, C, HALF, ROWS_OF_FEW, FEW_PARTS)
    else:
        BATCH: gl.constexpr = C.tiles.merge_batch
        take_turns(counter, left, ended, results, C, HALF, ROWS_OF_MANY, BATCH)


@gluon.jit
def take_turns(
    counter,
    left,
    ended,
    results,
    C: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,
):
    """Merge ROWS rows at a turn, until others have taken the rest."""
    row = count_at(counter, TURN) // TURN * ROWS
    while row < left:
        merge_latent_rows(row, left, ended, results, C, HALF, ROWS, BATCH)
        row = count_at(counter, TURN) // TURN * ROWS


@gluon.jit
def merge_latent_rows(
    row,
    stop,
    ended,
    results,
    C: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    BATCH: gl.constexpr,
):
    """Merge some rows of all parts, in the order of their keys, and write them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = row + gl.arange(0, ROWS, row_layout)
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    peak = gl.full([ROWS], -float("inf"), gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    merged = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    state, every = (peak, total, merged), (0, 1, ended.num_parts)
    given = (state, rows, stop, columns, every, ended, results.parts)
    out, lse = merge_slots(*given, rows_of_half, COLUMNS, BATCH, C, True)
    places = block_rows(rows, ended.block, ended.kv_head, C)
    if HALF == 0:
        store_lse(lse, places, rows < stop, results.lse, C)
    starts = places.to(gl.int64) * results.out.head + HALF * COLUMNS
    store_columns(spread_columns(out), results.out.ptr, starts, rows < stop)
