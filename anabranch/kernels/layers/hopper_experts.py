"""The Hopper kernel for products of experts: its launches, shared memory, and the roles of warps.

Programs stay and take tiles from a counter. A tile is 128 rows of one expert, and
`block_n` of its weights: outputs, or the gates and ups of half as many.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anabranch.kernels.gluon.barriers import make_barriers
from anabranch.kernels.gluon.boxes import shared_layout
from anabranch.kernels.layers.expert_config import (
    BLOCK_M,
    ExpertConstants,
    ExpertTiles,
    expert_constants,
)
from anabranch.kernels.layers.hopper_consumer import consume_tiles
from anabranch.kernels.layers.hopper_copies import make_tile_queue, produce_tiles
from anabranch.launches.recorder import launch

CONSUMER_REGISTERS = gl.constexpr(224)  # of a thread: three warpgroups have 168 on average
PRODUCER_REGISTERS = gl.constexpr(56)


def gate_experts(
    x: torch.Tensor,  # [num_tokens, k], contiguous rows
    w: torch.Tensor,  # [num_experts, 2 n, k], contiguous: gate before up
    order: torch.Tensor,  # int32 [num_rows]: token * top_k + choice
    starts: torch.Tensor,  # int32 [num_experts + 1]
    counter: torch.Tensor,  # int32 [1], 0
    y: torch.Tensor,  # [num_rows, n], in the order of experts
    tiles: ExpertTiles,
    num_programs: int,
) -> None:
    """Write silu(gate) * up of every row into `y`."""
    top_k = order.shape[0] // x.shape[0]
    _launch(x, w, order, starts, counter, None, y, tiles, num_programs, top_k)


def project_experts(
    x: torch.Tensor,  # [num_rows, k], in the order of experts
    w: torch.Tensor,  # [num_experts, n, k], contiguous
    order: torch.Tensor,  # int32 [num_rows]
    starts: torch.Tensor,  # int32 [num_experts + 1]
    counter: torch.Tensor,  # int32 [1], 0
    weights: torch.Tensor,  # [num_rows], contiguous: of each row's expert
    y: torch.Tensor,  # [num_rows, n]
    tiles: ExpertTiles,
    num_programs: int,
) -> None:
    """Write the weighted product of every row into `y`, in the order of tokens."""
    _launch(x, w, order, starts, counter, weights, y, tiles, num_programs, 1)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    counter: torch.Tensor,
    weights: torch.Tensor | None,
    y: torch.Tensor,
    tiles: ExpertTiles,
    num_programs: int,
    top_k: int,
) -> None:
    num_rows, (num_experts, _, k), n = order.shape[0], w.shape, y.shape[1]
    c = expert_constants(
        tiles,
        num_experts=num_experts,
        top_k=top_k,
        gated=weights is None,
        even=not k % tiles.block_k,
    )
    bound = num_rows // BLOCK_M + min(num_rows, num_experts)
    launch(
        expert_rows_kernel,
        (min(num_programs, bound * triton.cdiv(n, c.columns)),),
        None if c.gathers else _boxes(x, 64, c),
        x if c.gathers else None,
        x.stride(0) // 8,
        _boxes(w.view(-1, k), c.columns, c),
        order,
        starts,
        counter,
        weights,
        y,
        y.stride(0) // 8,
        n,
        k,
        num_experts,
        c,
        num_warps=4,
        maxnreg=(2 * CONSUMER_REGISTERS.value + PRODUCER_REGISTERS.value) // 3,
    )


def _boxes(x: torch.Tensor, rows: int, constants: ExpertConstants) -> TensorDescriptor:
    """Boxes [rows, block_k] of a matrix."""
    block = [rows, constants.block_k]
    return TensorDescriptor(
        x, list(x.shape), list(x.stride()), block, shared_layout(x.dtype, *block)
    )


@gluon.jit(do_not_specialize=["x_stride", "y_stride", "n", "k", "num_experts"])
def expert_rows_kernel(
    x_desc,  # [num_rows, k] in the order of experts; None where rows are gathered
    x_ptr,  # [num_tokens, k]; None where they are not
    x_stride,  # in units of 8 elements, as y_stride
    w_desc,  # [num_experts * n, k], or [num_experts * 2 n, k] without weights
    order_ptr,  # [num_rows]
    starts_ptr,  # [num_experts + 1]
    counter_ptr,  # [1]
    weights_ptr,  # [num_rows]; None: gate and up
    y_ptr,  # [num_rows, n]
    y_stride,
    n,
    k,
    num_experts,
    C: gl.constexpr,  # ExpertConstants
):
    """Multiply rows by the weights of their experts: two consumers of 64 rows each, a producer."""
    dtype: gl.constexpr = w_desc.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, C.block_k], dtype)
    x = gl.allocate_shared_memory(dtype, [C.stages * 2, 64, C.block_k], x_layout)
    w = gl.allocate_shared_memory(dtype, [C.stages, C.block_n, C.block_k], w_desc.layout)
    full = make_barriers(C.stages, C.arrivals)
    queue = make_tile_queue()
    fence_async_shared()
    operands = (x, w, full, queue)
    written = (order_ptr, weights_ptr, y_ptr, y_stride, n, k)
    source = (x_desc, x_ptr, x_stride, w_desc, order_ptr, starts_ptr, counter_ptr)
    gl.warp_specialize(
        [
            (consume_tiles, (operands, written, C, 0)),
            (consume_tiles, (operands, written, C, 1)),
            (produce_tiles, (operands, source, n, k, num_experts, C)),
        ],
        [4, C.producer_warps],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
