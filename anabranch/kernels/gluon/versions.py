"""Functions of Gluon whose names differ between versions of Triton, under one name each.

`thread_barrier()` joins the threads of a partition, `load_box` and `store_box` copy a box between
global and shared memory by the tensor memory accelerator, `load_shared` copies by each thread.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from anabranch.kernels.versions import since

thread_barrier = getattr(gl, since({(3, 6): "thread_barrier", (3, 7): "barrier"}))
load_box = getattr(tma, since({(3, 6): "async_copy_global_to_shared", (3, 8): "async_load"}))
store_box = getattr(tma, since({(3, 6): "async_copy_shared_to_global", (3, 8): "async_store"}))
load_shared = getattr(
    async_copy, since({(3, 6): "async_copy_global_to_shared", (3, 8): "async_load"})
)

# Options of launches whose loops fill 240 registers. Triton 3.9 calls ptxas 13 for Hopper and, for
# a bug of it, limits how it allocates them: in the loop over tiles of 128 keys and 128 dims, 20
# instructions then move registers to local memory and back. Without the limit none does where no
# key is masked, as with ptxas 12.
FULL_REGISTERS = since({(3, 6): {}, (3, 9): {"ptx_options": "--regAllocOptLevel=4"}})

# The same of loops that hold queries in registers and cut no block. 3.9 copies these operands
# before each product, and ptxas 13 keeps the copies, 20 in the loop over tiles of 128 dims, where
# ptxas 12.9, which 3.9 calls for older GPUs, has none. H200, us, with Triton 3.6, with 3.9 and
# ptxas 13, with 12.9: 1 x 8192 870, 914, 875; 4 x 4096 969, 1012, 975; heads of 256, 1 x 4096 414,
# 427, 420.
QUERIES_IN_REGISTERS: dict[str, Any] = since({(3, 6): {}, (3, 9): {"ptx_version": 88}})


def _has_older_ptxas() -> bool:
    try:
        return Path(knobs.nvidia.ptxas.path).is_file()
    except RuntimeError:  # Triton's, which looks for it
        return False


def _assemble_older_ptx(version: int) -> None:
    """Let Triton assemble PTX of a version for Hopper as it does for older GPUs."""
    assemble = CUDABackend.make_cubin

    def make_cubin(backend: Any, ptx: Any, metadata: Any, options: Any, capability: int) -> Any:
        if capability == 90 and options.ptx_version == version:
            backend = SimpleNamespace(target=SimpleNamespace(arch=80))
        return assemble(backend, ptx, metadata, options, capability)

    CUDABackend.make_cubin = make_cubin


if QUERIES_IN_REGISTERS and _has_older_ptxas():
    _assemble_older_ptx(QUERIES_IN_REGISTERS["ptx_version"])
elif QUERIES_IN_REGISTERS:
    QUERIES_IN_REGISTERS = FULL_REGISTERS

# Whether threads meet once more after they cleared the values past the end of a sequence. From 3.8
# on, where queries are in registers, the compiler sees no barrier between that and the loop over
# tiles, and puts one into it, before the product with values: all warps then wait for each other
# between the two products of a tile. With this one it stays where 3.6 has it, after the
# exponentials.
BARRIER_AFTER_CLEARING = gl.constexpr(since({(3, 6): False, (3, 8): True}))

# Whether two latent parts have a loop of their own that merges them, with more rows at a turn. With
# it, 3.9 keeps values of the loop over tiles of capped logits in local memory.
MERGES_TWO = gl.constexpr(since({(3, 6): True, (3, 9): False}))
