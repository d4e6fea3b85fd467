"""Functions of Gluon whose names differ between versions of Triton, under one name each.

`thread_barrier()` joins the threads of a partition, `load_box` and `store_box` copy a box between
global and shared memory by the tensor memory accelerator, `load_shared` copies by each thread.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from anabranch.launches.triton_version import since

thread_barrier = getattr(gl, since({(3, 6): "thread_barrier", (3, 7): "barrier"}))
load_box = getattr(tma, since({(3, 6): "async_copy_global_to_shared", (3, 8): "async_load"}))
store_box = getattr(tma, since({(3, 6): "async_copy_shared_to_global", (3, 8): "async_store"}))
load_shared = getattr(
    async_copy, since({(3, 6): "async_copy_global_to_shared", (3, 8): "async_load"})
)

# Whether threads meet once more after they cleared the values past the end of a sequence. From 3.8
# on, where queries are in registers, the compiler sees no barrier between that and the loop over
# tiles, and puts one into it, before the product with values: all warps then wait for each other
# between the two products of a tile. With this one it stays where 3.6 has it, after the
# exponentials.
BARRIER_AFTER_CLEARING = gl.constexpr(since({(3, 6): False, (3, 8): True}))

# Whether two latent parts have a loop of their own that merges them, with more rows at a turn. With
# it, 3.9 keeps values of the loop over tiles of capped logits in local memory.
MERGES_TWO = gl.constexpr(since({(3, 6): True, (3, 9): False}))
