"""Operands of Hopper's matrix instructions as Triton 3.6 wrote them, in PTX of 3.9.

3.9 writes two things that ptxas does not undo. It copies operands in registers by inline assembly
before each product. And it sums the lower word of a descriptor apart for each product, then joins
it with the same upper word: ptxas moves that word before each, and products that could follow each
other wait. One number of 64 bits that constants are added to has its upper word in place.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import torch

# How ptxas allocates registers. Triton 3.9 calls ptxas 13 and, for a bug of it, limits that: loops
# that fill 240 registers then move some to local memory and back. Without the limit they do not.
# To ptxas all three are the same; they tell the compiler what to rewrite. Triton finds compiled
# kernels by their options, not by this file: what rewrites them otherwise is spelled otherwise.
AS_WRITTEN = {"ptx_options": "--regAllocOptLevel=4"}
WHOLE_DESCRIPTORS = {"ptx_options": "--regAllocOptLevel=4 -O3"}
NO_COPIES = {"ptx_options": "--regAllocOptLevel=4 --opt-level=3"}
COPY = re.compile(r"\s*mov\.b32 (%r\d+), (%r\d+);")
LEAVES = re.compile(r"\$L__BB|.*\bbra\b")
REGISTER = re.compile(r"%rd?\d+")
DESTINATION = re.compile(r"\s*(?:@\S+\s+)?[a-z][\w.:]*\s+(%rd?\d+|\{[^}]*\})\s*[,;|]")
FIELD = re.compile(
    r"\t(?:bfe\.u32 +\t%r\d+, %r\d+, \d+, (?P<bits>\d+)|and\.b32 +\t%r\d+, %r\d+, (?P<mask>\d+));"
)
SUM = re.compile(r"\t(add\.s32|or\.b32) +\t%r\d+, (%r\d+), (\d+);")
WIDENED = re.compile(r"\tcvt\.u64\.u32 +\t%rd\d+, (%r\d+);")
JOINED = re.compile(r"\tor\.b64 +\t%rd\d+, (%rd\d+), (\d+);")


def on_hopper() -> bool:
    """Whether kernels are for Hopper, as far as is known: compiled without a GPU, they may be."""
    return not has_gpu() or is_hopper(torch.cuda.current_device())


@cache
def has_gpu() -> bool:
    """Whether torch finds one; asking takes longer than a launch may."""
    return torch.cuda.is_available()


@cache
def is_hopper(device: int) -> bool:
    """Whether the GPU of a number, of several that may differ, is of Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def teach_compiler() -> None:
    """Let Triton rewrite the PTX of kernels for Hopper that ask for it, and of no others."""
    from triton.backends.nvidia.compiler import (  # pyright: ignore[reportMissingTypeStubs]
        CUDABackend,
    )

    compiler: Any = CUDABackend
    make: Any = compiler.make_ptx

    def make_ptx(backend: Any, source: Any, metadata: Any, options: Any, capability: int) -> str:
        ptx: str = make(backend, source, metadata, options, capability)
        return rewrite_ptx(ptx, options.ptx_options) if capability == 90 else ptx

    compiler.make_ptx = make_ptx


def rewrite_ptx(ptx: str, options: str | None) -> str:
    """The same program with operands of products as the options ask for."""
    lines, gone = ptx.split("\n"), set[int]()
    if options == NO_COPIES["ptx_options"]:
        gone = use_operands(lines)
    elif options != WHOLE_DESCRIPTORS["ptx_options"]:
        return ptx
    gone |= add_to_descriptors(lines)
    return "\n".join(line for i, line in enumerate(lines) if i not in gone)


def use_operands(lines: list[str]) -> set[int]:
    """Let products read what was copied for them; the copies that nothing reads then."""
    sources: dict[str, str] = {}
    copies: dict[int, str] = {}

    def source_of(found: re.Match[str]) -> str:
        return sources.get(found[0], found[0])

    for i, line in enumerate(lines):
        if "wgmma.mma_async" in line:
            sums, end, operands = line.partition("}")
            lines[i] = sums + end + REGISTER.sub(source_of, operands)
        elif LEAVES.match(line):
            sources.clear()
        changed = set(written_by(line))
        for register in [x for x, source in sources.items() if changed & {x, source}]:
            del sources[register]
        if copy := COPY.fullmatch(line):
            sources[copy[1]], copies[i] = copy[2], copy[1]
    mentions = Counter(register for line in lines for register in set(REGISTER.findall(line)))
    return {i for i, register in copies.items() if mentions[register] == 1}


def written_by(line: str) -> list[str]:
    """The registers that an instruction writes; all that several in one line mention."""
    if line.count(";") > 1 or line.lstrip().startswith("{"):
        return REGISTER.findall(line)
    found = DESTINATION.match(line)
    return REGISTER.findall(found[1]) if found else []


class Definition(NamedTuple):
    """Where a register gets its value."""

    place: int
    line: str


def add_to_descriptors(lines: list[str]) -> set[int]:
    """Make descriptors that are joined from a sum and a constant sums of 64 bits; the old sums."""
    mentions = Counter(register for line in lines for register in REGISTER.findall(line))
    written = [(x, i) for i, line in enumerate(lines) for x in written_by(line)]
    times = Counter(register for register, _ in written)
    once = {x: Definition(i, lines[i]) for x, i in written if times[x] == 1}
    nowhere, gone = Definition(0, ""), set[int]()
    for i, line in enumerate(lines):
        if not (joined := JOINED.fullmatch(line)) or int(joined[2]) % 2**32:
            continue
        widening = once.get(joined[1], nowhere)
        if not (widened := WIDENED.fullmatch(widening.line)) or mentions[joined[1]] != 2:
            continue
        summing = once.get(widened[1], nowhere)
        if not (parts := SUM.fullmatch(summing.line)) or mentions[widened[1]] != 2:
            continue
        field = FIELD.fullmatch(once.get(parts[2], nowhere).line)
        if field is None:
            continue
        most = 2 ** int(field["bits"]) - 1 if field["bits"] else int(field["mask"])
        if is_sum(parts[1], int(parts[3]), most):
            gone.add(summing.place)
            lines[widening.place] = widening.line.replace(f" {widened[1]};", f" {parts[2]};")
            total = int(joined[2]) + int(parts[3])
            lines[i] = line.replace("or.b64", "add.s64").replace(f" {joined[2]};", f" {total};")
    return gone


def is_sum(operation: str, constant: int, most: int) -> bool:
    """Whether it adds a constant to a number of at most `most`, and stays within 32 bits."""
    apart = constant % 2 ** most.bit_length() == 0
    return constant + most < 2**32 and (operation == "add.s32" or apart)
