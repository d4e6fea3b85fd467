"""The sum of the rows of each token, one for every chosen expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.launches.recorder import launch

BLOCK = 1024  # columns of a program: 16 bytes a thread, of 16-bit elements


def sum_experts(
    x: torch.Tensor,  # [num_tokens * top_k, n], contiguous
    y: torch.Tensor,  # [num_tokens, n], contiguous
) -> None:
    """Write the sum of each token's rows, added in float32 in the order of its choices."""
    num_tokens, n = y.shape
    block = min(BLOCK, power_of_two(n))
    launch(
        sum_experts_kernel,
        (num_tokens, triton.cdiv(n, block)),
        x,
        y,
        n,
        TOP_K=x.shape[0] // num_tokens,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def sum_experts_kernel(
    x_ptr,  # [num_tokens * TOP_K, n]
    y_ptr,  # [num_tokens, n]
    n,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        row = token * TOP_K + choice
        total += tl.load(x_ptr + row * n + columns, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * n + columns, total.to(y_ptr.dtype.element_ty), mask)
