"""A kernel that only reads: what memory can deliver to programs that keep nothing of it."""

# pyright: basic, reportUntypedFunctionDecorator=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS_PER_SM = 4


def read(values: torch.Tensor) -> torch.Tensor:
    """Read all of an int32 vector, whose length is a multiple of the block."""
    num_sms = torch.cuda.get_device_properties(values.device).multi_processor_count
    num_programs = num_sms * PROGRAMS_PER_SM
    sums = torch.empty(num_programs, dtype=torch.int32, device=values.device)
    launch: Any = read_kernel[num_programs,]
    launch(values, sums, values.numel() // BLOCK, BLOCK=BLOCK, num_warps=8)
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
