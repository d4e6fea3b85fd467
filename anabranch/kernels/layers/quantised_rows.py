"""Few rows times a quantised weight: codes go from memory straight to the matrix unit's registers.

The matrix unit takes 16 outputs by 16 columns from a warp, four of them from a thread for each of
two outputs. Which columns meet is free as long as both sides agree: a thread takes 16 bytes of
codes, whose words become tiles of numbers where they are, and 16 bytes of a row. Warps share the
columns of a program's outputs, and add up at the end. Nothing goes through shared memory before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.layers.quantised_config import CodeConstants, RowsConfig
from anabranch.kernels.layers.quantised_product import CodeArguments
from anabranch.kernels.layers.widen_codes import widen_codes
from anabranch.launches.recorder import launch


def quantised_rows(
    x: torch.Tensor,  # [m, k], contiguous rows
    weight: CodeArguments,
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [m, n], contiguous
    constants: CodeConstants,
    config: RowsConfig,
    *,
    gated: bool = False,
) -> None:
    """Write x @ weight.T + bias into `y`; gated, silu of the first half times the second."""
    (m, k), n = x.shape, y.shape[1]
    outputs = config.block_n // 2 if gated else config.block_n
    launch(
        quantised_rows_kernel,
        (triton.cdiv(n, outputs), triton.cdiv(m, config.block_m)),
        x,
        weight._replace(words=weight.words.view(torch.int32)),
        bias,
        y,
        (x.stride(0), weight.words.stride(0) // 2, weight.scales.stride(0)),
        m,
        n,
        K=k,
        C=constants,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        RUNS=config.runs,
        GATED=gated,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if config.overlap else {}),
    )


@triton.jit
def load_pairs(ptrs, runs, C: tl.constexpr, LAST: tl.constexpr):
    """Pairs of words [32, runs, eights of outputs, fragments, 4]: 16 bytes a thread."""
    if LAST:
        runs = tl.minimum(runs, LAST)
    places = runs[None, :, None, None, None] * (C.words // 2)
    return tl.load(ptrs + places, eviction_policy="evict_first")


@triton.jit
def as_operand(pairs):
    """Words as the matrix unit takes them: [runs, outputs, fragments * 32].

    A thread has four neighbouring columns, then the four 16 columns on. They are chosen so that
    neighbouring registers of a row, which lies in memory as it is, are multiplied at once.
    """
    B: tl.constexpr = pairs.shape[1]
    H: tl.constexpr = pairs.shape[2]
    F: tl.constexpr = pairs.shape[3]
    words = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    words = tl.reshape(words, [8, 4, B, H, F, 2, 2, 2])
    words = tl.permute(words, (2, 3, 0, 4, 6, 1, 5, 7))
    return tl.reshape(words, [B, H * 8, F * 32])


@triton.jit
def load_columns(ptrs, runs, part, dims, step, WIDTH: tl.constexpr, C: tl.constexpr):
    """Columns of a part of runs as the matrix unit takes them: [runs, fragments * 32, rows].

    Where a part has several steps, columns of others than the one given are 0.
    """
    B: tl.constexpr = ptrs.shape[2]
    X: tl.constexpr = ptrs.shape[3]
    F: tl.constexpr = ptrs.shape[4]
    first = (runs * C.run + part * C.words)[None, None, :, None, None, None]
    if WIDTH:
        x = tl.load(ptrs + first, first + dims < WIDTH, other=0.0, eviction_policy="evict_last")
    else:
        x = tl.load(ptrs + first, eviction_policy="evict_last")
    if C.steps > 1:
        x = tl.where(dims // C.step % C.steps == step, x, tl.zeros_like(x))
    x = tl.reshape(x, [4, 8, B, X, F, 2, 2, 2])
    x = tl.permute(x, (2, 4, 6, 0, 5, 7, 3, 1))
    return tl.reshape(x, [B, F * 32, X * 8])


@triton.jit
def load_eight(ptr, first, columns, stride, last, C: tl.constexpr):
    """Scales or zeros [8, runs] of 8 outputs: so few that each thread loads its own."""
    groups = tl.minimum(first + tl.arange(0, 8), last) // C.group_n
    places = (columns // C.group_k).to(tl.int64)[None, :] * stride
    return tl.load(ptr + places + groups[:, None])


@triton.jit
def load_groups(
    ptr, columns, first, stride, last, half, C: tl.constexpr, GATED: tl.constexpr, H: tl.constexpr
):
    """Scales or zeros [runs, outputs] of a program's outputs, of the groups of columns."""
    B: tl.constexpr = columns.shape[0]
    if H == 2:
        second = first + (half if GATED else 8)
        low = load_eight(ptr, first, columns, stride, last, C)
        high = load_eight(ptr, second, columns, stride, last, C)
        return tl.reshape(tl.permute(tl.join(low, high), (1, 2, 0)), [B, 16])
    else:
        second = first + (half if GATED else 16)
        a = load_eight(ptr, first, columns, stride, last, C)
        b = load_eight(ptr, first + 8, columns, stride, last, C)
        c = load_eight(ptr, second, columns, stride, last, C)
        d = load_eight(ptr, second + 8, columns, stride, last, C)
        joined = tl.join(tl.join(a, c), tl.join(b, d))  # [8, runs, later half, odd eight]
        return tl.reshape(tl.permute(joined, (1, 2, 3, 0)), [B, 32])


@triton.jit
def add_runs(pairs, zeros, x_ptrs, runs, dims, products, WIDTH: tl.constexpr, C: tl.constexpr):
    """Add the products of runs of one group each to `products` [runs, outputs, rows]."""
    offset = zeros.to(tl.float32)[:, :, None]
    parts = widen_codes(as_operand(pairs), offset, x_ptrs.dtype.element_ty, C)
    PARTS: tl.constexpr = C.parts
    for part in tl.static_range(PARTS):
        x = load_columns(x_ptrs, runs, part, dims, 0, WIDTH, C)
        products = tl.dot(parts[part], x, products, input_precision="ieee")
    return products


@triton.jit
def add_groups(
    pairs, weight, place, x_ptrs, runs, dims, sums, K: tl.constexpr, WIDTH: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Add the products of runs whose parts are of several groups."""
    H: tl.constexpr = sums.shape[1] // 8
    words = as_operand(pairs)
    none = tl.full([words.shape[0], words.shape[1], 1], C.zero, tl.float32)
    parts = widen_codes(words, none, x_ptrs.dtype.element_ty, C)
    PARTS: tl.constexpr = C.parts
    STEPS: tl.constexpr = C.steps
    for part in tl.static_range(PARTS):
        for step in tl.static_range(STEPS):
            columns = tl.minimum(runs * C.run + part * C.words + step * C.step, K - 1)
            w = parts[part]
            if weight.zeros is not None:
                zeros = load_groups(weight.zeros, columns, *place, C, GATED, H)
                w -= (zeros.to(tl.float32) - C.zero).to(w.dtype)[:, :, None]
            scales = load_groups(weight.scales, columns, *place, C, GATED, H)
            x = load_columns(x_ptrs, runs, part, dims, step, WIDTH, C)
            products = tl.dot(w, x, tl.zeros_like(sums), input_precision="ieee")
            sums += products * scales.to(tl.float32)[:, :, None]
    return sums


@triton.jit
def place_outputs(first, outputs, half, GATED: tl.constexpr, COUNT: tl.constexpr):
    """Rows of the weight for the outputs of a program: gated, gates before what they gate."""
    if GATED:
        return first + outputs % (COUNT // 2) + outputs // (COUNT // 2) * half
    else:
        return first + outputs


@triton.jit
def gate_halves(sums):
    """silu(gate) * up [outputs, rows], of gates before what they gate."""
    halves = tl.reshape(sums, [2, sums.shape[0] // 2, sums.shape[1]])
    gate, up = tl.split(tl.permute(halves, (1, 2, 0)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["m", "n"])
def quantised_rows_kernel(
    x_ptr,  # [m, K]
    weight,  # CodeArguments, its words as int32
    bias_ptr,  # [n] or None
    y_ptr,  # [m, n]
    strides,  # of rows of x, pairs of words and scales
    m,
    n,
    K: tl.constexpr,
    C: tl.constexpr,  # CodeConstants
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    x_stride, pairs_stride, scales_stride = strides
    H: tl.constexpr = BLOCK_N // 8
    X: tl.constexpr = BLOCK_M // 8
    F: tl.constexpr = C.words // 32
    NUM_RUNS: tl.constexpr = (K + C.run - 1) // C.run
    LAST: tl.constexpr = NUM_RUNS - 1 if NUM_RUNS % RUNS else 0  # of runs, where it is checked
    WIDTH: tl.constexpr = K if K % (C.run * RUNS) else 0  # columns, where they are checked
    GROUPED: tl.constexpr = C.group_k < K and not C.short
    OUTPUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_output = tl.program_id(0) * OUTPUTS
    last = (2 * n if GATED else n) - 1
    steps, lanes = tl.arange(0, RUNS), tl.arange(0, 32)
    none = tl.zeros([RUNS], tl.int32)
    own = tl.arange(0, H)[None, :] * 8 + lanes[:, None] // 4
    own = tl.minimum(place_outputs(first_output, own, n, GATED, BLOCK_N), last).to(tl.int64)
    pair_ptrs = weight.words + (own * pairs_stride)[:, None, :, None, None]
    pair_ptrs += (tl.arange(0, F) * 16)[None, None, None, :, None]
    pair_ptrs += none[None, :, None, None, None]
    pair_ptrs += (lanes % 4 * 4)[:, None, None, None, None] + tl.arange(0, 4)
    pairs = load_pairs(pair_ptrs, steps, C, LAST)
    place = first_output, scales_stride, last, n
    columns = tl.minimum(steps * C.run, K - 1)
    zeros = tl.full([RUNS, BLOCK_N], C.zero, tl.float32)
    scales = zeros
    if not C.short:
        scales = load_groups(weight.scales, columns, *place, C, GATED, H)
        if weight.zeros is not None:
            zeros = load_groups(weight.zeros, columns, *place, C, GATED, H)

    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, X)[None, :] * 8 + tl.arange(0, 8)[:, None]
    rows = tl.minimum(rows, m - 1).to(tl.int64)[None, :, None, :, None, None]
    dims = (tl.arange(0, 4) * 8)[:, None, None, None, None, None] + tl.arange(0, 8)
    dims += (tl.arange(0, F) * 32)[None, None, None, None, :, None]
    x_ptrs = x_ptr + rows * x_stride + dims + none[None, None, :, None, None, None]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    sums = tl.zeros([RUNS, BLOCK_N, BLOCK_M], tl.float32)
    for first in range(0, NUM_RUNS, RUNS):
        runs = first + steps
        following, following_scales, following_zeros = pairs, scales, zeros
        if first + RUNS < NUM_RUNS:
            following = load_pairs(pair_ptrs, runs + RUNS, C, LAST)
        if C.short:
            sums = add_groups(pairs, weight, place, x_ptrs, runs, dims, sums, K, WIDTH, C, GATED)
        elif GROUPED:
            columns = tl.minimum((runs + RUNS) * C.run, K - 1)
            following_scales = load_groups(weight.scales, columns, *place, C, GATED, H)
            if weight.zeros is not None:
                following_zeros = load_groups(weight.zeros, columns, *place, C, GATED, H)
            products = tl.zeros_like(sums)
            products = add_runs(pairs, zeros, x_ptrs, runs, dims, products, WIDTH, C)
            sums += products * scales.to(tl.float32)[:, :, None]
        else:
            sums = add_runs(pairs, zeros, x_ptrs, runs, dims, sums, WIDTH, C)
        pairs, scales, zeros = following, following_scales, following_zeros
    if C.group_k >= K:
        sums *= scales.to(tl.float32)[:, :, None]

    sums = tl.sum(sums, 0)
    if GATED:
        sums = gate_halves(sums)
    outputs = first_output + tl.arange(0, OUTPUTS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, outputs < n, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    places = rows.to(tl.int64)[None, :] * n + outputs[:, None]
    mask = (rows < m)[None, :] & (outputs < n)[:, None]
    tl.store(y_ptr + places, sums.to(y_ptr.dtype.element_ty), mask)
