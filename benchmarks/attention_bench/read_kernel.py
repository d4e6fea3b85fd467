"""A kernel that only reads: what memory can deliver to programs that keep nothing of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

BLOCK = 4096


def read(values: torch.Tensor, num_programs: int) -> torch.Tensor:
    """Read all of an int32 vector, whose length is a multiple of the block."""
    sums = torch.empty(num_programs, dtype=torch.int32, device=values.device)
    num_blocks = values.numel() // BLOCK
    launch(read_kernel, (num_programs,), values, sums, num_blocks, BLOCK=BLOCK, num_warps=8)
    return sums


@triton.jit(do_not_specialize=["num_blocks"])
def read_kernel(
    values_ptr,  # int32 [num_blocks * BLOCK]
    sums_ptr,  # int32 [num_programs]
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Each program sums every num_programs-th block."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for _ in range(program, num_blocks, num_programs):
        total += tl.load(values_ptr + offsets)
        offsets += num_programs * BLOCK
    tl.store(sums_ptr + program, tl.sum(total, 0))
