"""The consumers of the product of experts: each multiplies and writes 64 rows of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anabranch.kernels.gluon.barriers import bar_arrive, exp2
from anabranch.kernels.layers.hopper_copies import TILE_FREE, next_tile
from anabranch.kernels.softmax.online_softmax import LOG2_E


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction; 0 for an infinite x."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def issue_stage(x, w, full, done, acc, use_acc, C: gl.constexpr, WG: gl.constexpr):
    """Add the product of one stage to the accumulator, under way."""
    slot = done % C.stages
    mbarrier.wait(full.index(slot), (done // C.stages) & 1)
    if C.gathers:
        fence_async_shared()  # gathered rows are plain writes, which the matrix unit reads
    rows = x.index(2 * slot + WG)
    weights = w.index(slot).permute((1, 0))
    return warpgroup_mma(rows, weights, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply_tile(x, w, full, done, num_steps, C: gl.constexpr, WG: gl.constexpr):
    """The product of this consumer's rows; a stage is freed while the next one is multiplied."""
    BLOCK_N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
    acc = issue_stage(x, w, full, done, acc, False, C, WG)
    acc = warpgroup_mma_wait(1, [acc])
    for step in range(1, num_steps):
        acc = issue_stage(x, w, full, done + step, acc, True, C, WG)
        acc = warpgroup_mma_wait(1, [acc])
        bar_arrive(TILE_FREE + (done + step - 1) % C.stages, C.threads)
    acc = warpgroup_mma_wait(0, [acc])
    bar_arrive(TILE_FREE + (done + num_steps - 1) % C.stages, C.threads)
    return acc


@gluon.jit
def pass_tile(full, done, num_steps, C: gl.constexpr):
    """Free the stages of a tile that has no rows for this consumer.

    Each is waited for: a second arrival before the producer's would be one too many.
    """
    for step in range(0, num_steps):
        slot = (done + step) % C.stages
        mbarrier.wait(full.index(slot), ((done + step) // C.stages) & 1)
        bar_arrive(TILE_FREE + slot, C.threads)


@gluon.jit
def halves(x):
    """The left and the right columns of a tile."""
    HALF: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, HALF]), (0, 2, 1)))


@gluon.constexpr_function
def store_layout(width):
    """16 bytes a thread, the threads of a warp along the columns."""
    lanes = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def write_columns(y, y_ptr, starts, inside, first, n):
    """Write 16-bit rows that begin at `starts`, in units of 8 columns, those that are `inside`."""
    layout: gl.constexpr = store_layout(y.shape[1])
    columns = first + gl.arange(0, y.shape[1], gl.SliceLayout(0, layout))
    # n is a multiple of 8, so that 8 columns are inside together
    mask = inside[:, None] & (columns // 8 < n // 8)[None, :]
    pointers = y_ptr + (starts * 8)[:, None] + columns[None, :]
    gl.store(pointers, gl.convert_layout(y.to(y_ptr.dtype.element_ty), layout), mask)


@gluon.jit
def consume_tiles(operands, written, C: gl.constexpr, WG: gl.constexpr):
    """Multiply one tile after another, until one has no rows at all."""
    x, w, full, queue = operands
    order_ptr, weights_ptr, y_ptr, y_stride, n, k = written
    WIDTH: gl.constexpr = C.block_n // 2
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.block_n, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, store_layout(WIDTH))
    num_steps = (k + C.block_k - 1) // C.block_k
    done = 0
    count = 0
    start, stop, column = next_tile(queue, count)
    while start < stop:
        first = start + WG * 64
        if first < stop:
            places = first + gl.arange(0, 64, row_layout)
            inside = places < stop
            if C.gated:
                acc = multiply_tile(x, w, full, done, num_steps, C, WG)
                gate, up = halves(acc)
                y = gate * reciprocal(1.0 + exp2(gate * -LOG2_E)) * up
                starts = places.to(gl.int64) * y_stride
                write_columns(y, y_ptr, starts, inside, column * WIDTH, n)
            else:
                rows = gl.load(order_ptr + places, inside, other=0)
                own = first + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
                own_rows = gl.load(order_ptr + own, own < stop, other=0)
                weights = gl.load(weights_ptr + own_rows, own < stop, other=0.0).to(gl.float32)
                acc = multiply_tile(x, w, full, done, num_steps, C, WG)
                left, right = halves(acc * weights[:, None])
                starts = rows.to(gl.int64) * y_stride
                write_columns(left, y_ptr, starts, inside, column * 2 * WIDTH, n)
                write_columns(right, y_ptr, starts, inside, column * 2 * WIDTH + WIDTH, n)
        else:
            pass_tile(full, done, num_steps, C)
        done += num_steps
        count += 1
        start, stop, column = next_tile(queue, count)
