"""The product of a row with a weight: bound by reading the weight.

A program owns a few outputs and reads their weights straight into registers. With OVERLAP the
first of them are on their way before the kernel ahead has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.linear_config import LinearConfig
from anabranch.launches.recorder import launch


def linear(
    x: torch.Tensor,  # [k]
    w: torch.Tensor,  # [n, k], contiguous rows; gated: [2 n, k]
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [n]
    config: LinearConfig,
    *,
    gated: bool = False,
) -> None:
    """Write w @ x + bias into `y`; gated, silu of the first half times the second."""
    k, n = x.shape[0], y.shape[0]
    outputs = config.block_n // 2 if gated else config.block_n
    launch(
        linear_kernel,
        (triton.cdiv(n, outputs),),
        x,
        w,
        bias,
        y,
        w.stride(0),
        n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, power_of_two(k)),
        GATED=gated,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.overlap else {}),
    )


@triton.jit
def load_weights(w_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns [first, first + BLOCK_K) of some rows, zero after the last."""
    if K % BLOCK_K == 0:
        return tl.load(w_ptrs + first, eviction_policy="evict_first")
    else:
        mask = (first + dims < K)[None, :]
        return tl.load(w_ptrs + first, mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_x(x_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of x, zero after the last; every program reads them."""
    if K % BLOCK_K == 0:
        return tl.load(x_ptrs + first, eviction_policy="evict_last")
    else:
        return tl.load(x_ptrs + first, first + dims < K, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["n"])
def linear_kernel(
    x_ptr,  # [K]
    w_ptr,  # [n, K], or [2 n, K] if GATED
    bias_ptr,  # [n] or None
    y_ptr,  # [n]
    w_stride,
    n,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight; if GATED, pairs of them make an output
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    VECTOR: tl.constexpr = 8,  # products that a thread adds up before they meet others
):
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_output = tl.program_id(0) * OUTPUTS
    rows = tl.arange(0, BLOCK_N)
    if GATED:
        rows = tl.minimum(first_output + rows // 2, n - 1) + rows % 2 * n
    else:
        rows = tl.minimum(first_output + rows, n - 1)
    dims = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * w_stride + dims[None, :]
    w = load_weights(w_ptrs, 0, dims, K, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for first in range(0, K, BLOCK_K):
        following = w
        if first + BLOCK_K < K:
            following = load_weights(w_ptrs, first + BLOCK_K, dims, K, BLOCK_K)
        x = load_x(x_ptr + dims, first, dims, K, BLOCK_K).to(tl.float32)
        products = w.to(tl.float32) * x[None, :]
        sums += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), 2)
        w = following

    y = tl.sum(sums, 1)
    outputs = first_output + tl.arange(0, OUTPUTS)
    mask = outputs < n
    if GATED:
        gate, up = tl.split(tl.reshape(y, [OUTPUTS, 2]))
        y = gate / (1.0 + tl.exp(-gate)) * up
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + outputs, y.to(y_ptr.dtype.element_ty), mask)
