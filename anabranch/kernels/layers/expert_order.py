"""Rows in the order of their experts, without a look at the device's data on the host.

A program lists the rows of one expert. It counts the rows of the experts before it by itself, so
programs neither wait for each other nor add to the same number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.launches.recorder import launch

BLOCK = 8192  # rows looked at once
FEW_ROWS = 1024  # that four warps look at


def order_experts(
    experts: torch.Tensor,  # integer [num_rows], the expert of each row
    order: torch.Tensor,  # int32 [num_rows]
    starts: torch.Tensor,  # int32 [num_experts + 1]
    counters: torch.Tensor,  # int32 [2]
) -> None:
    """Write the rows of expert e, ascending, to `order` from `starts[e]` to `starts[e + 1]`.

    The counters, from which both products take their tiles, become 0.
    """
    num_experts = starts.shape[0] - 1
    block = min(BLOCK, max(power_of_two(experts.shape[0]), 16))
    launch(
        order_experts_kernel,
        (num_experts,),
        experts,
        order,
        starts,
        counters,
        experts.shape[0],
        BLOCK=block,
        num_warps=4 if block <= FEW_ROWS else 8,
    )


@triton.jit(do_not_specialize=["num_rows"])
def order_experts_kernel(
    experts_ptr,  # [num_rows]
    order_ptr,  # [num_rows]
    starts_ptr,  # [num_experts + 1]
    counters_ptr,  # [2]
    num_rows,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_rows, BLOCK):
        rows = first + places
        found = tl.load(experts_ptr + rows, rows < num_rows, other=expert)
        earlier += (found < expert).to(tl.int32)
    start = tl.sum(earlier, 0)
    tl.store(starts_ptr + expert, start)
    for first in range(0, num_rows, BLOCK):
        rows = first + places
        mask = rows < num_rows
        own = mask & (tl.load(experts_ptr + rows, mask, other=0) == expert)
        count = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order_ptr + start + count - 1, rows, own)
        start += tl.sum(own.to(tl.int32), 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, start)
        tl.store(counters_ptr + tl.arange(0, 2), 0)
