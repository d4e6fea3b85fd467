"""Products of rows of e4m3 codes with a weight of them, by the matrix unit as they are.

The weight is the tall side, so that few rows waste little. Where tiles are few, programs share the
columns of one, and the last to arrive adds up the sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.layers.quantised_config import (
    RUN,
    QuantisedConfig,
)
from anabranch.kernels.layers.quantised_product import write_outputs
from anabranch.launches.recorder import launch


def scaled_product(
    x: torch.Tensor,  # e4m3 [m, k], contiguous
    x_scales: torch.Tensor,  # float32 [m]
    w: torch.Tensor,  # e4m3 [n, k], contiguous
    w_scales: torch.Tensor,  # [1, n]
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [m, n], contiguous
    sums: torch.Tensor | None,  # float32 [splits, m, n], where columns are split
    counters: torch.Tensor,  # int32, 0: one a tile
    config: QuantisedConfig,
) -> None:
    """Write (x @ w.T) * x_scales * w_scales + bias into `y`."""
    (m, k), n = x.shape, y.shape[1]
    launch(
        scaled_product_kernel,
        (triton.cdiv(n, config.block_n), triton.cdiv(m, config.block_m), config.splits),
        x,
        x_scales,
        w,
        w_scales,
        bias,
        y,
        sums,
        counters,
        m,
        n,
        K=k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=RUN,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if config.overlap else {}),
    )


@triton.jit(do_not_specialize=["m"])
def scaled_product_kernel(
    x_ptr,  # [m, K]
    x_scales_ptr,  # [m]
    w_ptr,  # [n, K]
    w_scales_ptr,  # [n]
    bias_ptr,  # [n] or None
    y_ptr,  # [m, n]
    sums_ptr,  # [splits, m, n]; None: columns are not split
    counters_ptr,  # [tiles]
    m,
    n,
    K: tl.constexpr,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_K)
    own = tl.minimum(outputs, n - 1)
    w_ptrs = w_ptr + own.to(tl.int64)[:, None] * K + dims[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * K + dims[:, None]
    NUM_RUNS: tl.constexpr = K // BLOCK_K
    begin = tl.program_id(2) * NUM_RUNS // tl.num_programs(2)
    end = (tl.program_id(2) + 1) * NUM_RUNS // tl.num_programs(2)
    w_scales = tl.load(w_scales_ptr + own).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    inside = (rows < m)[None, :]
    for run in range(begin, end):
        w = tl.load(w_ptrs + run * BLOCK_K, eviction_policy="evict_first")
        x = tl.load(x_ptrs + run * BLOCK_K, inside, other=0.0, eviction_policy="evict_last")
        sums = tl.dot(w, x, sums)
    x_scales = tl.load(x_scales_ptr + rows, rows < m, other=0.0)
    sums = tl.trans(sums * w_scales[:, None]) * x_scales[:, None]
    write_outputs(sums, rows, outputs, bias_ptr, y_ptr, sums_ptr, counters_ptr, m, n)
