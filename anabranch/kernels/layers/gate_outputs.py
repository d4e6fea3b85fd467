"""silu(gate) * up of rows that hold gates before what they gate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

BLOCK, NUM_WARPS = 2048, 8  # columns of a program: 16 bytes a thread of each


def gate_outputs(
    joined: torch.Tensor,  # [m, 2 n], contiguous
    y: torch.Tensor,  # [m, n], contiguous
) -> None:
    """Write silu of the first half of each row times the second."""
    m, n = y.shape
    grid = m, triton.cdiv(n, BLOCK)
    launch(gate_outputs_kernel, grid, joined, y, n, BLOCK=BLOCK, num_warps=NUM_WARPS)


@triton.jit
def gate_outputs_kernel(
    joined_ptr,  # [m, 2 n]
    y_ptr,  # [m, n]
    n,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    gate = tl.load(joined_ptr + row * 2 * n + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(joined_ptr + (row * 2 + 1) * n + columns, mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * n + columns, y.to(y_ptr.dtype.element_ty), mask)
