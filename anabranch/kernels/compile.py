"""Kernels compiled ahead of time for GPUs that are not here, and what they need there.

A call of a launcher on meta tensors is recorded instead of run: a launch says exactly what Triton
is to compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for, and the most that one program may use of it."""

    gpu: GPUTarget
    registers: int  # of a thread
    shared_bytes: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 255, 163 * 1024),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 255, 227 * 1024),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 255, 227 * 1024),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 512, 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was recorded instead of run."""

    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]  # constexprs, num_warps and the like


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel needs, and how wide it loads."""

    kernel: str
    registers: int
    spills: int  # bytes of local memory (NVIDIA), vector registers (AMD)
    shared_bytes: int
    load_bytes: list[int]  # of each instruction that loads global memory
    waits: bool  # for the kernel ahead, before it reads global memory


def record(call: Callable[[], object]) -> list[Launch]:
    """The launches that `call` makes; none of them runs."""
    launches: list[Launch] = []

    def keep(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        launches.append(Launch(kernel, args, options))

    with mock.patch.object(JITFunction, "run", keep):
        call()
    return launches


def compile_launch(launch: Launch, target: Target) -> CompiledKernel:
    """Compile as the launch itself would on that GPU, with the same specialisation."""
    kernel, backend = launch.kernel, make_backend(target.gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = dict(launch.options)
    if target.gpu.backend == "hip":
        given.pop("maxnreg", None)  # AMD's compiler takes no limit
    bound, specialization, options = bind(*launch.args, **given)
    options, signature, constexprs, attributes = kernel._pack_args(
        backend, given, bound, specialization, options
    )
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target.gpu, options=options.__dict__)


def resources(compiled: CompiledKernel) -> Resources:
    """Read registers, spills and shared memory from the binary, load widths from the assembly."""
    if compiled.metadata.target.backend == "cuda":
        registers, spills, static = _cubin_usage(compiled.asm["cubin"], compiled.name)
        loads = [
            int(lanes or 1) * int(bits) // 8
            for lanes, bits in re.findall(
                r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bfsu](\d+) ", compiled.asm["ptx"]
            )
        ]
    else:
        text = compiled.asm["amdgcn"]
        registers, spills, static = (
            int(re.search(rf"\.{field}:\s+(\d+)", text)[1])
            for field in ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
        )
        loads = [
            4 * int(words or 1) if word else 2
            for word, words in re.findall(
                r"\b(?:buffer|global)_load_(?:(dword)(?:x(\d))?|u?short)", text
            )
        ]
    shared_bytes = max(static, compiled.metadata.shared)
    waits = _waits(compiled.asm.get("ptx", ""))
    return Resources(compiled.name, registers, spills, shared_bytes, loads, waits)


def _waits(ptx: str) -> bool:
    """Whether griddepcontrol.wait stands before everything that touches global memory."""
    wait = ptx.find("griddepcontrol.wait")
    touch = re.search(r"\b(ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async", ptx)
    return wait >= 0 and (touch is None or wait < touch.start())


def _cubin_usage(cubin: bytes, kernel: str) -> tuple[int, int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = text.partition(f"Function {kernel}:")[2]
    registers, stack, shared, local = (
        int(re.search(rf"{field}:(\d+)", usage)[1]) for field in ("REG", "STACK", "SHARED", "LOCAL")
    )
    return registers, stack + local, shared
