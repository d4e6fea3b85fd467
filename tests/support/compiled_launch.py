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


# Lines of PTX: the wait for the kernel ahead, what may touch global memory, and the barrier where
# the default partition of a warp-specialised kernel releases the others
WAIT = r"^griddepcontrol\.wait"
TOUCH = r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global|\bcp\.async|\bcall\b"
RELEASE = r"^barrier\.sync\s+1;"


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
    if target.gpu.arch != 90:
        given.pop("ptx_options", None)
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
    waits = waits_first(compiled.asm.get("ptx", ""))
    return Resources(compiled.name, registers, spills, shared_bytes, loads, waits)


def waits_first(ptx: str) -> bool:
    """Whether each path through a kernel waits for the one ahead before it touches global memory.

    The partitions of a warp-specialised kernel lie on paths of their own, and each must wait; or
    the default one must before it releases the others, which meet it at a barrier.
    """
    first = _first_on_paths(ptx, f"{WAIT}|{TOUCH}|{RELEASE}")
    if sum(bool(re.search(RELEASE, line)) for line in first) > 1:  # the default partition's too
        first = _first_on_paths(ptx, f"{WAIT}|{TOUCH}")
    touches = any(re.search(TOUCH, line) for line in first)
    return not touches and any(re.search(WAIT, line) for line in first)


def _first_on_paths(ptx: str, pattern: str) -> list[str]:
    """The lines of a pattern that paths from the entry come to first."""
    lines = [line.partition("//")[0].strip() for line in ptx.splitlines()]
    places = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
    starts = [place for place, line in enumerate(lines) if ".entry" in line]
    found, followed = list[str](), set[int]()
    while starts:
        place = starts.pop()
        while place < len(lines) and place not in followed:
            followed.add(place)
            line = lines[place]
            if re.search(pattern, line):
                found.append(line)
                break
            starts += [places[label] for label in _jumps(line, ptx)]
            if re.match(r"bra\b|brx|ret\b|exit\b|trap\b", line):
                break
            place += 1
    return found


def _jumps(line: str, ptx: str) -> list[str]:
    """Labels of the compiler that a line may go on at; those inside inline assembly stay there."""
    if table := re.search(r"\bbrx\.idx\S*\s+\S+\s+(\S+);", line):
        targets = re.search(rf"{re.escape(table[1])}:\s*\.branchtargets([^;]+);", ptx)
        assert targets, line
        return re.findall(r"[^\s,]+", targets[1])
    return re.findall(r"\bbra\S*\s+(\$L\w+);", line)


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
