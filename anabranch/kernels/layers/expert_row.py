"""The chosen experts of one token: bound by reading their weights.

Each expert has one row, so nothing is put in order. A program owns a few outputs and reads their
weights straight into registers; the second product also adds up the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.linear import load_weights
from anabranch.launches.recorder import launch

BLOCK_N = 4  # rows of a weight that a program reads at once,
BLOCK_K = 2048  # and columns of them, or half as many
NUM_WARPS = 4


def gate_row(
    x: torch.Tensor,  # [k], contiguous
    w: torch.Tensor,  # [num_experts, 2 n, k], contiguous: gate before up
    experts: torch.Tensor,  # integer [top_k], contiguous
    y: torch.Tensor,  # [top_k, n], contiguous
    *,
    overlap: bool,
) -> None:
    """Write silu(gate) * up of the token for each of its experts."""
    (k,), (top_k, n) = x.shape, y.shape
    launch(
        gate_row_kernel,
        (triton.cdiv(n, BLOCK_N // 2), top_k),
        x,
        w,
        experts,
        y,
        n,
        K=k,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_block_k(k),
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def project_row(
    x: torch.Tensor,  # [top_k, k], contiguous
    w: torch.Tensor,  # [num_experts, n, k], contiguous
    experts: torch.Tensor,  # integer [top_k], contiguous
    weights: torch.Tensor,  # [top_k], contiguous
    y: torch.Tensor,  # [n], contiguous
    *,
    overlap: bool,
) -> None:
    """Write the weighted sum of the products of the token's experts."""
    (top_k, k), (n,) = x.shape, y.shape
    launch(
        project_row_kernel,
        (triton.cdiv(n, BLOCK_N),),
        x,
        w,
        experts,
        weights,
        y,
        n,
        K=k,
        TOP_K=top_k,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_block_k(k),
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def _block_k(k: int) -> int:
    """Columns in as few tiles as possible, without a part of one if there are several."""
    block = BLOCK_K if k <= BLOCK_K or k % BLOCK_K == 0 else BLOCK_K // 2
    return min(block, max(power_of_two(k), 16))


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Launches of both products on meta tensors."""

    def launch_case() -> None:
        k, n, top_k = 2048, 1408, 6
        new = partial(torch.empty, dtype=torch.bfloat16, device="meta")
        experts = torch.empty(top_k, dtype=torch.int32, device="meta")
        overlap = shared_bytes >= 227 * 1024
        gate_row(new(k), new(64, 2 * n, k), experts, new(top_k, n), overlap=overlap)
        weights = torch.empty(top_k, device="meta")
        project_row(new(top_k, n), new(64, k, n), experts, weights, new(k), overlap=overlap)

    yield "6 experts", launch_case


@triton.jit
def add_products(x_ptr, w, first, dims, scale, sums, K: tl.constexpr, VECTOR: tl.constexpr):
    """Add the products of x's columns with a tile, VECTOR of which meet in one sum."""
    x = tl.load(x_ptr + first + dims, first + dims < K, other=0.0).to(tl.float32) * scale
    products = w.to(tl.float32) * x[None, :]
    return sums + tl.sum(tl.reshape(products, [sums.shape[0], sums.shape[1], VECTOR]), 2)


@triton.jit(do_not_specialize=["n"])
def gate_row_kernel(
    x_ptr,  # [K]
    w_ptr,  # [num_experts, 2 n, K]
    experts_ptr,  # [top_k]
    y_ptr,  # [top_k, n]
    n,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,  # pairs of rows make an output
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    VECTOR: tl.constexpr = 8,
):
    OUTPUTS: tl.constexpr = BLOCK_N // 2
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    choice = tl.program_id(1)
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    rows = tl.arange(0, BLOCK_N)
    rows = tl.minimum(tl.program_id(0) * OUTPUTS + rows // 2, n - 1) + rows % 2 * n
    dims = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (expert * 2 * n + rows)[:, None] * K + dims[None, :]

    w = load_weights(w_ptrs, 0, dims, K, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for first in range(0, K, BLOCK_K):
        following = w
        if first + BLOCK_K < K:
            following = load_weights(w_ptrs, first + BLOCK_K, dims, K, BLOCK_K)
        sums = add_products(x_ptr, w, first, dims, 1.0, sums, K, VECTOR)
        w = following
    gate, up = tl.split(tl.reshape(tl.sum(sums, 1), [OUTPUTS, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * up
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(y_ptr + choice * n + outputs, y.to(y_ptr.dtype.element_ty), outputs < n)


@triton.jit(do_not_specialize=["n"])
def project_row_kernel(
    x_ptr,  # [TOP_K, K]
    w_ptr,  # [num_experts, n, K]
    experts_ptr,  # [TOP_K]
    weights_ptr,  # [TOP_K]
    y_ptr,  # [n]
    n,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    VECTOR: tl.constexpr = 8,
):
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K  # of one expert
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, n - 1).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows[:, None] * K + dims[None, :]

    expert = tl.load(experts_ptr).to(tl.int64)
    w = load_weights(w_ptrs + expert * n * K, 0, dims, K, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for tile in range(TOP_K * TILES):
        following = w
        if tile + 1 < TOP_K * TILES:
            expert = tl.load(experts_ptr + (tile + 1) // TILES).to(tl.int64)
            first = (tile + 1) % TILES * BLOCK_K
            following = load_weights(w_ptrs + expert * n * K, first, dims, K, BLOCK_K)
        choice = tile // TILES
        weight = tl.load(weights_ptr + choice).to(tl.float32)
        first = tile % TILES * BLOCK_K
        sums = add_products(x_ptr + choice * K, w, first, dims, weight, sums, K, VECTOR)
        w = following
    y = tl.sum(sums, 1)
    tl.store(y_ptr + outputs, y.to(y_ptr.dtype.element_ty), outputs < n)
