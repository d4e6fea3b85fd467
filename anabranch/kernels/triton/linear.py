"""Products of a row or two with a weight: bound by reading the weight.

A program owns a few outputs and reads their weights straight into registers. With OVERLAP the
first of them are on their way before the kernel ahead has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.linear_config import LinearConfig, every_linear_config, fit_linear


def linear(
    x: torch.Tensor,  # [num_rows, k], contiguous rows
    w: torch.Tensor,  # [n, k], contiguous rows
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [num_rows, n]
    config: LinearConfig,
) -> None:
    """Write x @ w.T + bias into `y`."""
    n, k = w.shape
    linear_kernel[(triton.cdiv(n, config.block_n),)](
        x,
        w,
        bias,
        y,
        (x.stride(0), w.stride(0), y.stride(0)),
        n,
        K=k,
        NUM_ROWS=x.shape[0],
        BLOCK_N=config.block_n,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(k)),
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.overlap else {}),
    )


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches on meta tensors that cover the configurations."""
    hopper = shared_bytes >= 227 * 1024

    def launch(config: LinearConfig, dtype: torch.dtype, *, biased: bool) -> object:
        x, w, y = (
            torch.empty(shape, dtype=dtype, device="meta")
            for shape in ((config.num_rows, 4096), (6144, 4096), (config.num_rows, 6144))
        )
        return linear(x, w, y[0] if biased else None, y, fit_linear(config, hopper=hopper))

    for config in every_linear_config():
        name = f"{config.num_rows} x {config.block_n} x {config.block_k}"
        yield f"{name} bfloat16", partial(launch, config, torch.bfloat16, biased=False)
        yield f"{name} float16 bias", partial(launch, config, torch.float16, biased=True)


@triton.jit
def load_weights(w_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The columns [first, first + BLOCK_K) of some rows, zero behind the last."""
    if K % BLOCK_K == 0:
        return tl.load(w_ptrs + first, eviction_policy="evict_first")
    else:
        mask = (first + dims < K)[None, :]
        return tl.load(w_ptrs + first, mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_x(x_ptrs, first, dims, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of one row of x, zero behind the last; every program reads them."""
    if K % BLOCK_K == 0:
        return tl.load(x_ptrs + first, eviction_policy="evict_last")
    else:
        return tl.load(x_ptrs + first, first + dims < K, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["n"])
def linear_kernel(
    x_ptr,  # [NUM_ROWS, K]
    w_ptr,  # [n, K]
    bias_ptr,  # [n] or None
    y_ptr,  # [NUM_ROWS, n]
    strides,  # of the rows of x, w and y
    n,
    K: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    VECTOR: tl.constexpr = 8,  # products that a thread adds up before they meet others
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_K)
    w_rows = tl.minimum(columns, n - 1).to(tl.int64) * strides[1]
    w_ptrs = w_ptr + w_rows[:, None] + dims[None, :]
    w = load_weights(w_ptrs, 0, dims, K, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = ()
    for _ in tl.static_range(NUM_ROWS):
        sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)  # noqa: RUF005

    for first in range(0, K, BLOCK_K):
        following = w
        if first + BLOCK_K < K:
            following = load_weights(w_ptrs, first + BLOCK_K, dims, K, BLOCK_K)
        wide, added = w.to(tl.float32), ()
        for row in tl.static_range(NUM_ROWS):
            x = load_x(x_ptr + row * strides[0] + dims, first, dims, K, BLOCK_K).to(tl.float32)
            products = tl.reshape(wide * x[None, :], [BLOCK_N, BLOCK_K // VECTOR, VECTOR])
            added = added + (sums[row] + tl.sum(products, 2),)  # noqa: RUF005 (no unpacking)
        w, sums = following, added

    for row in tl.static_range(NUM_ROWS):
        y = tl.sum(sums[row], 1)
        mask = columns < n
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * strides[2] + columns, y.to(y_ptr.dtype.element_ty), mask)
