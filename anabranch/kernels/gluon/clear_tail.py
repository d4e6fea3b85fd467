"""Values past the end of a sequence, cleared in shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from anabranch.kernels.gluon.barriers import BOTH_CONSUMERS, CONSUMERS_MEET, bar_sync
from anabranch.kernels.gluon.versions import BARRIER_AFTER_CLEARING, thread_barrier


@gluon.jit
def clear_rows(values, valid, C: gl.constexpr, WG: gl.constexpr):
    """Zeros for the keys from `valid` on; each consumer clears half of the tile."""
    HALF: gl.constexpr = C.block_n // 2
    WIDTH: gl.constexpr = values.shape[1]
    LANES: gl.constexpr = min(WIDTH // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    half = values.slice(WG * HALF, HALF, 0)
    keys = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    half.store(gl.where((keys < valid)[:, None], half.load(layout), 0.0).to(values.dtype))


@gluon.jit
def clear_tail(v, done, valid, C: gl.constexpr, WG: gl.constexpr):
    """Clear values past the end of the sequence: a weight of 0 times NaN would be NaN."""
    if valid < C.block_n:
        slot = done % C.stages
        mbarrier.wait(v.full.index(slot), (done // C.stages) & 1)
        clear_rows(v.main.index(slot), valid, C, WG)
        if C.dv_rest:
            clear_rows(v.rest.index(slot), valid, C, WG)
        fence_async_shared()
        bar_sync(CONSUMERS_MEET, BOTH_CONSUMERS)
        if BARRIER_AFTER_CLEARING:
            thread_barrier()
