"""Products of rows with the weights of their experts, in tiles that each belong to one expert.

A program finds its tile from where the rows of experts begin, so the grid is an upper bound and
nothing is read on the host; programs without a tile end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.expert_config import ExpertConfig
from anabranch.launches.recorder import launch


def gate_experts(
    x: torch.Tensor,  # [num_tokens, k], contiguous rows
    w: torch.Tensor,  # [num_experts, 2 n, k], contiguous: gate before up
    order: torch.Tensor,  # int32 [num_rows]: token * top_k + choice
    starts: torch.Tensor,  # int32 [num_experts + 1]
    y: torch.Tensor,  # [num_rows, n], in the order of experts
    config: ExpertConfig,
) -> None:
    """Write silu(gate) * up of every row into `y`."""
    top_k = order.shape[0] // x.shape[0]
    _launch(x, w, order, starts, None, y, config, top_k=top_k)


def project_experts(
    x: torch.Tensor,  # [num_rows, k], in the order of experts
    w: torch.Tensor,  # [num_experts, n, k], contiguous
    order: torch.Tensor,  # int32 [num_rows]
    starts: torch.Tensor,  # int32 [num_experts + 1]
    weights: torch.Tensor,  # [num_rows], contiguous: of each row's expert
    y: torch.Tensor,  # [num_rows, n]
    config: ExpertConfig,
) -> None:
    """Write the weighted product of every row into `y`, in the order of tokens."""
    _launch(x, w, order, starts, weights, y, config, top_k=1)


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    weights: torch.Tensor | None,
    y: torch.Tensor,
    config: ExpertConfig,
    *,
    top_k: int,
) -> None:
    num_rows, num_experts, n = order.shape[0], w.shape[0], y.shape[1]
    num_tiles = num_rows // config.block_m + min(num_rows, num_experts)
    launch(
        expert_product_kernel,
        (num_tiles, triton.cdiv(n, config.block_n)),
        x,
        w,
        order,
        starts,
        weights,
        y,
        (x.stride(0), w.stride(0), y.stride(0)),
        n,
        num_experts,
        K=x.shape[1],
        TOP_K=top_k,
        EXPERTS=power_of_two(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def find_tile(starts_ptr, ticket, experts, num_experts, num_columns, BLOCK_M: tl.constexpr):
    """(expert, start, stop, column) of a ticket: a tile of rows, and one of `num_columns` tiles of
    columns. No rows after the last ticket.

    Tickets of one expert follow each other, those of one column first. `experts` are all indices.
    """
    mask = experts < num_experts
    first = tl.load(starts_ptr + experts, mask, other=0)
    last = tl.load(starts_ptr + experts + 1, mask, other=0)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends * num_columns <= ticket).to(tl.int32), 0)
    own = experts == expert
    own_tiles = tl.maximum(tl.sum(tl.where(own, tiles, 0), 0), 1)
    place = ticket - tl.sum(tl.where(own, (ends - tiles) * num_columns, 0), 0)
    start = tl.sum(tl.where(own, first, 0), 0) + place % own_tiles * BLOCK_M
    stop = tl.sum(tl.where(own, last, 0), 0)
    return expert, start, tl.minimum(stop, start + BLOCK_M), place // own_tiles


@triton.jit
def load_columns(ptrs, mask, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK_K columns, zero after the last and where `mask` is not."""
    if K % BLOCK_K != 0:
        mask = mask & (first + dims < K)
    return tl.load(ptrs + first, mask, other=0.0)


@triton.jit(do_not_specialize=["n", "num_experts"])
def expert_product_kernel(
    x_ptr,  # [num_tokens, K], or [num_rows, K] in the order of experts
    w_ptr,  # [num_experts, n, K], or [num_experts, 2 n, K] without weights
    order_ptr,  # [num_rows]
    starts_ptr,  # [num_experts + 1]
    weights_ptr,  # [num_rows]; None: gate and up
    y_ptr,  # [num_rows, n]
    strides,  # of rows of x, experts of w, rows of y
    n,
    num_experts,
    K: tl.constexpr,
    TOP_K: tl.constexpr,  # rows of a token of x
    EXPERTS: tl.constexpr,  # the next power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    x_stride, w_stride, y_stride = strides
    GATED: tl.constexpr = weights_ptr is None
    expert, start, stop, _ = find_tile(
        starts_ptr, tl.program_id(0), tl.arange(0, EXPERTS), num_experts, 1, BLOCK_M
    )
    if start >= stop:
        return
    places = start + tl.arange(0, BLOCK_M)
    mask = places < stop
    rows = tl.load(order_ptr + places, mask, other=0)
    read = (rows // TOP_K if GATED else places).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (outputs < n)[None, :]
    x_ptrs = x_ptr + read[:, None] * x_stride + dims[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride + outputs[None, :] * K + dims[:, None]

    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        x = load_columns(x_ptrs, mask[:, None], first, dims[None, :], K, BLOCK_K)
        w = load_columns(w_ptrs, inside, first, dims[:, None], K, BLOCK_K)
        sums = tl.dot(x, w, sums, input_precision="ieee")
        if GATED:
            w = load_columns(w_ptrs + n * K, inside, first, dims[:, None], K, BLOCK_K)
            up_sums = tl.dot(x, w, up_sums, input_precision="ieee")

    if GATED:
        y = sums / (1.0 + tl.exp(-sums)) * up_sums
        written = places.to(tl.int64)
    else:
        weights = tl.load(weights_ptr + rows, mask, other=0.0).to(tl.float32)
        y = sums * weights[:, None]
        written = rows.to(tl.int64)
    y_ptrs = y_ptr + written[:, None] * y_stride + outputs[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask[:, None] & inside)
