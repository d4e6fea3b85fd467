"""Products of rows with the quantised weights of their experts: codes are widened in registers.

Tiles belong to one expert each, as in `expert_product`; in a tile, outputs are the tall side of the
matrix unit, as in `quantised_product`. Gates and what they gate share one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.expert_product import find_tile
from anabranch.kernels.layers.quantised_config import (
    CodeConstants,
    QuantisedConfig,
)
from anabranch.kernels.layers.quantised_product import CodeArguments, load_first, sum_runs
from anabranch.kernels.layers.quantised_rows import gate_halves, place_outputs
from anabranch.launches.recorder import launch


def gate_quantised_experts(
    x: torch.Tensor,  # [num_tokens, k], contiguous rows
    weight: CodeArguments,  # of [num_experts * 2 n, k]: of each expert gate before up
    order: torch.Tensor,  # int32 [num_rows]: token * top_k + choice
    starts: torch.Tensor,  # int32 [num_experts + 1]
    y: torch.Tensor,  # [num_rows, n], in the order of experts
    constants: CodeConstants,
    config: QuantisedConfig,
) -> None:
    """Write silu(gate) * up of every row into `y`."""
    top_k = order.shape[0] // x.shape[0]
    _launch(x, weight, order, starts, None, y, constants, config, top_k)


def project_quantised_experts(
    x: torch.Tensor,  # [num_rows, k], in the order of experts
    weight: CodeArguments,  # of [num_experts * n, k]
    order: torch.Tensor,  # int32 [num_rows]
    starts: torch.Tensor,  # int32 [num_experts + 1]
    weights: torch.Tensor,  # [num_rows], contiguous: of each row's expert
    y: torch.Tensor,  # [num_rows, n]
    constants: CodeConstants,
    config: QuantisedConfig,
) -> None:
    """Write the weighted product of every row into `y`, in the order of tokens."""
    _launch(x, weight, order, starts, weights, y, constants, config, 1)


def _launch(
    x: torch.Tensor,
    weight: CodeArguments,
    order: torch.Tensor,
    starts: torch.Tensor,
    weights: torch.Tensor | None,
    y: torch.Tensor,
    constants: CodeConstants,
    config: QuantisedConfig,
    top_k: int,
) -> None:
    num_rows, num_experts, n = order.shape[0], starts.shape[0] - 1, y.shape[1]
    num_tiles = num_rows // config.block_m + min(num_rows, num_experts)
    outputs = config.block_n // (2 if weights is None else 1)
    launch(
        quantised_experts_kernel,
        (triton.cdiv(n, outputs), num_tiles),
        x,
        weight,
        order,
        starts,
        weights,
        y,
        (x.stride(0), weight.words.stride(0), weight.scales.stride(0), y.stride(0)),
        n,
        num_experts,
        K=x.shape[1],
        C=constants,
        TOP_K=top_k,
        EXPERTS=power_of_two(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["n", "num_experts"])
def quantised_experts_kernel(
    x_ptr,  # [num_tokens, K], or [num_rows, K] in the order of experts
    weight,  # CodeArguments
    order_ptr,  # [num_rows]
    starts_ptr,  # [num_experts + 1]
    weights_ptr,  # [num_rows]; None: gate and up
    y_ptr,  # [num_rows, n]
    strides,  # of rows of x, words, scales and y
    n,
    num_experts,
    K: tl.constexpr,
    C: tl.constexpr,  # CodeConstants
    TOP_K: tl.constexpr,  # rows of a token of x
    EXPERTS: tl.constexpr,  # the next power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    x_stride, words_stride, scales_stride, y_stride = strides
    GATED: tl.constexpr = weights_ptr is None
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    expert, start, stop, _ = find_tile(
        starts_ptr, tl.program_id(1), tl.arange(0, EXPERTS), num_experts, 1, BLOCK_M
    )
    if start >= stop:
        return
    places = start + tl.arange(0, BLOCK_M)
    mask = places < stop
    rows = tl.load(order_ptr + places, mask, other=0)
    read = (rows // TOP_K if GATED else places).to(tl.int64)
    first = tl.program_id(0) * OUTPUTS
    each = 2 * n if GATED else n
    own = place_outputs(first, tl.arange(0, BLOCK_N), n, GATED, BLOCK_N)
    own = expert.to(tl.int64) * each + tl.minimum(own, each - 1)
    dims = tl.arange(0, C.words)
    x_ptrs = x_ptr + read[None, :] * x_stride + dims[:, None]
    word_ptrs = weight.words + own[:, None] * words_stride + dims[None, :]
    groups = own // C.group_n
    NUM_RUNS: tl.constexpr = (K + C.run - 1) // C.run
    shift = tl.program_id(0) % NUM_RUNS
    runs = 0, NUM_RUNS, shift
    ahead = load_first(weight, groups, shift, scales_stride, C)
    sums = sum_runs(
        word_ptrs, weight, groups, scales_stride, ahead, x_ptrs, mask[None, :], runs, K, C
    )
    if GATED:
        sums, written = gate_halves(sums), places.to(tl.int64)
    else:
        weights = tl.load(weights_ptr + rows, mask, other=0.0).to(tl.float32)
        sums, written = sums * weights[None, :], rows.to(tl.int64)
    outputs = first + tl.arange(0, OUTPUTS)
    y_ptrs = y_ptr + written[:, None] * y_stride + outputs[None, :]
    inside = mask[:, None] & (outputs < n)[None, :]
    tl.store(y_ptrs, tl.trans(sums).to(y_ptr.dtype.element_ty), inside)
