"""The chosen experts of one token: bound by reading their weights, numbers or words of codes.

Each expert has one row, so nothing is put in order. A program owns a few outputs and reads their
weights straight into registers; the second product also adds up the experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.linear import load_weights
from anabranch.kernels.layers.quantised_config import CodeConstants
from anabranch.kernels.layers.widen_codes import widen_codes
from anabranch.launches.recorder import launch

BLOCK_N = 4  # rows of a weight that a program reads at once,
BLOCK_K = 2048  # and columns of them, or half as many; of codes, words
NUM_WARPS = 4


class ExpertWeight(NamedTuple):
    """Numbers [num_experts, n, k], contiguous; or words of the codes of all, with their groups."""

    w: torch.Tensor  # or int16 [num_experts * n, runs * words of a run]
    scales: torch.Tensor | None = None  # [column groups, row groups]
    zeros: torch.Tensor | None = None  # the same shape

    @property
    def strides(self) -> tuple[int, int]:
        """Elements of a row, and row groups."""
        return self.w.shape[-1], 0 if self.scales is None else self.scales.stride(0)


def gate_row(
    x: torch.Tensor,  # [k], contiguous
    weight: ExpertWeight,  # of [num_experts, 2 n, k]: gate before up
    experts: torch.Tensor,  # integer [top_k], contiguous
    y: torch.Tensor,  # [top_k, n], contiguous
    constants: CodeConstants | None = None,  # of codes
    *,
    overlap: bool,
) -> None:
    """Write silu(gate) * up of the token for each of its experts."""
    (k,), (top_k, n), width = x.shape, y.shape, weight.w.shape[-1]
    launch(
        gate_row_kernel,
        (triton.cdiv(n, BLOCK_N // 2), top_k),
        x,
        weight,
        experts,
        y,
        weight.strides,
        n,
        K=k,
        WIDTH=width,
        C=constants,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_block_k(width),
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def project_row(
    x: torch.Tensor,  # [top_k, k], contiguous
    weight: ExpertWeight,  # of [num_experts, n, k]
    experts: torch.Tensor,  # integer [top_k], contiguous
    weights: torch.Tensor,  # [top_k], contiguous
    y: torch.Tensor,  # [n], contiguous
    constants: CodeConstants | None = None,  # of codes
    *,
    overlap: bool,
) -> None:
    """Write the weighted sum of the products of the token's experts."""
    (top_k, k), (n,), width = x.shape, y.shape, weight.w.shape[-1]
    launch(
        project_row_kernel,
        (triton.cdiv(n, BLOCK_N),),
        x,
        weight,
        experts,
        weights,
        y,
        weight.strides,
        n,
        K=k,
        WIDTH=width,
        C=constants,
        TOP_K=top_k,
        BLOCK_N=BLOCK_N,
        BLOCK_K=_block_k(width),
        OVERLAP=overlap,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def _block_k(k: int) -> int:
    """Columns in as few tiles as possible, without a part of one if there are several."""
    block = BLOCK_K if k <= BLOCK_K or k % BLOCK_K == 0 else BLOCK_K // 2
    return min(block, max(power_of_two(k), 16))


@triton.jit
def add_products(
    x_ptr, weight, w, rows, stride, first, dims, factor, sums, K: tl.constexpr, C: tl.constexpr
):
    """Add the products of x's columns times a factor with a tile; several meet in one sum."""
    VECTOR: tl.constexpr = dims.shape[0] // sums.shape[1]
    if C is None:
        x = tl.load(x_ptr + first + dims, first + dims < K, other=0.0).to(tl.float32) * factor
        products = w.to(tl.float32) * x[None, :]
        sums += tl.sum(tl.reshape(products, [sums.shape[0], sums.shape[1], VECTOR]), 2)
    else:
        none = tl.full([sums.shape[0], 1], C.zero, tl.float32)
        parts = widen_codes(w, none, x_ptr.dtype.element_ty, C)
        firsts = tl.arange(0, sums.shape[1]) * VECTOR
        firsts = first * C.parts + firsts // C.words * C.run + firsts % C.words
        columns = first * C.parts + dims // C.words * C.run + dims % C.words
        groups = (rows // C.group_n)[:, None]
        PARTS: tl.constexpr = C.parts
        for part in tl.static_range(PARTS):
            own = columns + part * C.words
            x = tl.load(x_ptr + own, own < K, other=0.0).to(tl.float32) * factor
            products = parts[part].to(tl.float32) * x[None, :]
            products = tl.sum(tl.reshape(products, [sums.shape[0], sums.shape[1], VECTOR]), 2)
            places = tl.minimum(firsts + part * C.words, K - 1) // C.group_k
            places = places.to(tl.int64)[None, :] * stride + groups
            if weight.zeros is not None:
                zeros = tl.load(weight.zeros + places).to(tl.float32) - C.zero
                products -= zeros * tl.sum(tl.reshape(x, [1, sums.shape[1], VECTOR]), 2)
            sums += products * tl.load(weight.scales + places).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["n"])
def gate_row_kernel(
    x_ptr,  # [K]
    weight,  # ExpertWeight, of [num_experts, 2 n, K]
    experts_ptr,  # [top_k]
    y_ptr,  # [top_k, n]
    strides,  # of rows and column groups
    n,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row: K, or words
    C: tl.constexpr,  # CodeConstants; None: numbers
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
    rows += expert * 2 * n
    dims = tl.arange(0, BLOCK_K)
    w_ptrs = weight.w + rows[:, None] * WIDTH + dims[None, :]

    w = load_weights(w_ptrs, 0, dims, WIDTH, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        following = w
        if first + BLOCK_K < WIDTH:
            following = load_weights(w_ptrs, first + BLOCK_K, dims, WIDTH, BLOCK_K)
        sums = add_products(x_ptr, weight, w, rows, strides[1], first, dims, 1.0, sums, K, C)
        w = following
    gate, up = tl.split(tl.reshape(tl.sum(sums, 1), [OUTPUTS, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * up
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(y_ptr + choice * n + outputs, y.to(y_ptr.dtype.element_ty), outputs < n)


@triton.jit(do_not_specialize=["n"])
def project_row_kernel(
    x_ptr,  # [TOP_K, K]
    weight,  # ExpertWeight, of [num_experts, n, K]
    experts_ptr,  # [TOP_K]
    weights_ptr,  # [TOP_K]
    y_ptr,  # [n]
    strides,  # of rows and column groups
    n,
    K: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row: K, or words
    C: tl.constexpr,  # CodeConstants; None: numbers
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    VECTOR: tl.constexpr = 8,
):
    TILES: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K  # of one expert
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, n - 1).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    w_ptrs = weight.w + rows[:, None] * WIDTH + dims[None, :]

    expert = tl.load(experts_ptr).to(tl.int64)
    w = load_weights(w_ptrs + expert * n * WIDTH, 0, dims, WIDTH, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for tile in range(TOP_K * TILES):
        own, following = expert * n + rows, w
        if tile + 1 < TOP_K * TILES:
            expert = tl.load(experts_ptr + (tile + 1) // TILES).to(tl.int64)
            first = (tile + 1) % TILES * BLOCK_K
            following = load_weights(w_ptrs + expert * n * WIDTH, first, dims, WIDTH, BLOCK_K)
        choice = tile // TILES
        factor = tl.load(weights_ptr + choice).to(tl.float32)
        first, x_ptrs = tile % TILES * BLOCK_K, x_ptr + choice * K
        sums = add_products(x_ptrs, weight, w, own, strides[1], first, dims, factor, sums, K, C)
        w = following
    y = tl.sum(sums, 1)
    tl.store(y_ptr + outputs, y.to(y_ptr.dtype.element_ty), outputs < n)
