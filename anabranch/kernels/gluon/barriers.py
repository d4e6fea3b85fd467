"""Named barriers, and what keeps LLVM and ptxas from moving instructions of the hot loop.

Everything here leans on Triton 3.6; `tests/kernels/test_cross_compile.py` looks at the result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Named barriers of a program. Triton takes 0 (default partition), 1 (start and end) and 2 + i
# (worker i, padding included), here up to 5.
#
#     id          attend_kernel                        attend_latent_kernel
#     6           both consumers meet                  weights of even halves are left
#     7           first queries and keys on their way  weights of odd halves are left
#     8 to 11     slots of K are free                  8, 9 left columns, 10, 11 right columns free
#     12 to 15    slots of V are free                  12 sums are left, 13 queries are read
CONSUMERS_MEET = gl.constexpr(6)
FIRST_KEYS = gl.constexpr(7)
K_FREE = gl.constexpr(8)
V_FREE = gl.constexpr(12)
EVEN_DONE = gl.constexpr(6)
ODD_DONE = gl.constexpr(7)
LEFT_FREE = gl.constexpr(8)
RIGHT_FREE = gl.constexpr(10)
SUMS_DONE = gl.constexpr(12)
Q_FREE = gl.constexpr(13)
# Threads that meet there
BOTH_CONSUMERS = gl.constexpr(256)
BOTH_AND_PRODUCER = gl.constexpr(288)
CONSUMER_AND_PRODUCER = gl.constexpr(160)
BOTH_PRODUCERS = gl.constexpr(64)


@gluon.jit
def bar_sync(barrier, THREADS: gl.constexpr):
    """Arrive and wait for the others."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; // $0",
        "=r,r,n",
        [barrier, THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bar_arrive(barrier, THREADS: gl.constexpr):
    """Arrive and go on. Unlike mbarrier.arrive it needs no barrier of the warpgroup.

    In a first version of the loop: 864 us against 884 for 1 x 8192, 32/8 heads of 128, H200.
    """
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; // $0",
        "=r,r,n",
        [barrier, THREADS],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def exp2(x):
    """2^x in one instruction; denormal results become 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh(x):
    """tanh(x) in one instruction, with an error of at most 2^-11 of it.

    That is what a 16-bit logit would be rounded by. 1 - 2 / (e^2x + 1) needs two more: a prompt of
    4096 tokens with 16/8 heads of 256 on an H200, 265 us against 211 without a softcap.
    """
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def uniform(x):
    """A value that all threads of a warp share, so that ptxas keeps it in a uniform register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def lane():
    """The number of a thread in its warp: a scalar that differs from thread to thread."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def of_lane(x, LANE: gl.constexpr):
    """The value of one thread of the warp, for all of them."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        "=r,r,n",
        [x, LANE],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def hidden_zero(count):
    """0 at run time: an index that LLVM cannot fold.

    With constant indices it lifts the matrix descriptors of Q out of the loop, where they cost
    registers.
    """
    return count >> 20


@gluon.jit
def carry_weights(weights, acc, dtype: gl.constexpr, C: gl.constexpr):
    """Weights [ROWS, KEYS] in 16 bits, for the product of the next tile.

    Where blocks may be cut they go through the loop as words [ROWS, KEYS / 2]. As halves, LLVM
    takes them apart there and joins them again in every tile: 32 of 766 instructions.
    """
    if C.splits:
        HALF: gl.constexpr = weights.shape[1] // 2
        halves = weights.to(dtype).to(gl.int16, bitcast=True)
        even, odd = gl.split(gl.reshape(halves, [weights.shape[0], HALF, 2]))
        return gl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def carried_weights(carried, acc, dtype: gl.constexpr, C: gl.constexpr):
    """What `carry_weights` returned, as the left operand of a product that is added to `acc`."""
    if C.splits:
        even = (carried & 0xFFFF).to(gl.int16)
        odd = (carried >> 16).to(gl.int16)
        halves = gl.reshape(gl.join(even, odd), [carried.shape[0], 2 * carried.shape[1]])
        layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
        return gl.convert_layout(halves.to(dtype, bitcast=True), layout)
    else:
        return carried


@gluon.jit
def make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """Barriers in shared memory, each complete after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def prefetch_maps(C: gl.constexpr):
    """Fetch the tensor maps, which are parameters, while the kernel ahead ends."""
    gl.inline_asm_elementwise(C.prefetch_maps, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
