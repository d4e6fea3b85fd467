"""Products of rows with a quantised weight: codes are read once and widened in registers.

The weight is the tall side of the matrix unit, so that few rows waste little of it. A tile of a
weight is a run of columns; scales of a group are applied to the sums of its columns, in float32.
Where tiles are few, programs share the columns of one, and the last to arrive adds up the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.layers.quantised_config import (
    CodeConstants,
    QuantisedConfig,
)
from anabranch.kernels.layers.widen_codes import widen_codes
from anabranch.launches.recorder import launch


class CodeArguments(NamedTuple):
    """A weight as kernels read it."""

    words: torch.Tensor  # int16 [n, runs * words of a run]: codes, as `pack_codes` orders them
    scales: torch.Tensor  # [column groups, row groups]
    zeros: torch.Tensor | None  # [column groups, row groups]: taken from codes


def quantised_product(
    x: torch.Tensor,  # [m, k], contiguous rows
    weight: CodeArguments,
    bias: torch.Tensor | None,  # [n]
    y: torch.Tensor,  # [m, n], contiguous
    sums: torch.Tensor | None,  # float32 [splits, m, n], where columns are split
    counters: torch.Tensor,  # int32, 0: one a tile
    constants: CodeConstants,
    config: QuantisedConfig,
) -> None:
    """Write x @ weight.T + bias into `y`."""
    (m, k), n = x.shape, y.shape[1]
    launch(
        quantised_product_kernel,
        (triton.cdiv(n, config.block_n), triton.cdiv(m, config.block_m), config.splits),
        x,
        weight,
        bias,
        y,
        sums,
        counters,
        (x.stride(0), weight.words.stride(0), weight.scales.stride(0)),
        m,
        n,
        K=k,
        C=constants,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if config.overlap else {}),
    )


@triton.jit
def load_part(x_ptrs, inside, first, K: tl.constexpr, C: tl.constexpr):
    """Columns of a part of a run, from `first` on."""
    if K % C.run:
        inside = inside & (first + tl.arange(0, C.words) < K)[:, None]
    return tl.load(x_ptrs + first, inside, other=0.0, eviction_policy="evict_last")


@triton.jit
def load_group(ptrs, run, stride, C: tl.constexpr):
    """Scales or zeros of the outputs for a run of columns."""
    return tl.load(ptrs + (run * C.run // C.group_k).to(tl.int64) * stride)


@triton.jit
def add_run(words, offset, x_ptrs, inside, first, sums, K: tl.constexpr, C: tl.constexpr):
    """Add the products of a run of columns of one group to `sums` [outputs, rows]."""
    parts = widen_codes(words, offset, x_ptrs.dtype.element_ty, C)
    PARTS: tl.constexpr = C.parts
    for part in tl.static_range(PARTS):
        x = load_part(x_ptrs, inside, first + part * C.words, K, C)
        sums = tl.dot(parts[part], x, sums, input_precision="ieee")
    return sums


@triton.jit
def add_groups(
    words, weight, groups, stride, x_ptrs, inside, first, sums, K: tl.constexpr, C: tl.constexpr
):
    """Add the products of a run whose parts are of several groups."""
    none = tl.full([words.shape[0], 1], C.zero, tl.float32)
    parts = widen_codes(words, none, x_ptrs.dtype.element_ty, C)
    PARTS: tl.constexpr = C.parts
    STEPS: tl.constexpr = C.steps
    for part in tl.static_range(PARTS):
        x = load_part(x_ptrs, inside, first + part * C.words, K, C)
        for step in tl.static_range(STEPS):
            column = tl.minimum(first + part * C.words + step * C.step, K - 1)
            places = groups + (column // C.group_k).to(tl.int64) * stride
            w = parts[part]
            if weight.zeros is not None:
                zeros = tl.load(weight.zeros + places).to(tl.float32) - C.zero
                w -= zeros.to(w.dtype)[:, None]
            if STEPS > 1:  # the columns of others count as 0
                own = tl.arange(0, C.words) // C.step == step
                w = tl.where(own[None, :], w, tl.zeros_like(w))
            products = tl.dot(w, x, tl.zeros_like(sums), input_precision="ieee")
            sums += products * tl.load(weight.scales + places).to(tl.float32)[:, None]
    return sums


@triton.jit
def load_first(weight, groups, run, stride, C: tl.constexpr):
    """Scales and zeros of the outputs for the first run that is multiplied."""
    scales = load_group(weight.scales + groups, run, stride, C)
    if weight.zeros is not None:
        return scales, load_group(weight.zeros + groups, run, stride, C)
    else:
        return scales, tl.full(groups.shape, C.zero, tl.float32)


@triton.jit
def sum_runs(
    word_ptrs, weight, groups, stride, first, x_ptrs, inside, runs, K: tl.constexpr, C: tl.constexpr
):
    """Products of outputs with rows [outputs, rows] over runs [begin, end) from a shift on."""
    begin, end, shift = runs
    scales, zeros = first
    GROUPED: tl.constexpr = C.group_k < K and not C.short
    sums = tl.zeros([word_ptrs.shape[0], x_ptrs.shape[1]], tl.float32)
    for step in range(begin, end):
        run = step + shift
        run = tl.where(run >= end, run - (end - begin), run)
        following, following_zeros = scales, zeros
        if GROUPED:  # on their way while this run is multiplied
            after = tl.where(run + 1 == end, begin, run + 1)
            following = load_group(weight.scales + groups, after, stride, C)
            if weight.zeros is not None:
                following_zeros = load_group(weight.zeros + groups, after, stride, C)
        words = tl.load(word_ptrs + run * C.words, eviction_policy="evict_first")
        offset = zeros.to(tl.float32)[:, None]
        if C.short:
            sums = add_groups(
                words, weight, groups, stride, x_ptrs, inside, run * C.run, sums, K, C
            )
        elif GROUPED:
            products = tl.zeros_like(sums)
            products = add_run(words, offset, x_ptrs, inside, run * C.run, products, K, C)
            sums += products * scales.to(tl.float32)[:, None]
        else:
            sums = add_run(words, offset, x_ptrs, inside, run * C.run, sums, K, C)
        scales, zeros = following, following_zeros
    if C.group_k >= K:
        sums *= scales.to(tl.float32)[:, None]
    return sums


@triton.jit
def join_sums(sums, parts_ptr, counter_ptr, places, mask, size):
    """Leave sums of a part of the columns; (are all there, the sums of all parts)."""
    split, splits = tl.program_id(2), tl.num_programs(2)
    tl.store(parts_ptr + split * size + places, sums, mask)
    tl.debug_barrier()  # every warp's stores come before the release below
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = before == splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
        sums = tl.zeros_like(sums)
        for part in range(splits):
            sums += tl.load(parts_ptr + part * size + places, mask, other=0.0, cache_modifier=".cg")
    return is_last, sums


@triton.jit
def write_outputs(sums, rows, outputs, bias_ptr, y_ptr, sums_ptr, counters_ptr, m, n):
    """Write a tile of outputs; where columns are split, the last program to arrive does."""
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = outputs.shape[0]
    first = tl.program_id(1).to(tl.int64) * BLOCK_M * n + tl.program_id(0) * BLOCK_N
    places = tl.arange(0, BLOCK_M)[:, None] * n + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < m)[:, None] & (outputs < n)[None, :]
    if sums_ptr is not None:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts_ptr, size = sums_ptr + first, m.to(tl.int64) * n
        is_last, sums = join_sums(sums, parts_ptr, counters_ptr + tile, places, mask, size)
        mask = mask & is_last
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, outputs < n, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    tl.store(y_ptr + first + places, sums.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["m"])
def quantised_product_kernel(
    x_ptr,  # [m, K]
    weight,  # CodeArguments
    bias_ptr,  # [n] or None
    y_ptr,  # [m, n]
    sums_ptr,  # [splits, m, n]; None: columns are not split
    counters_ptr,  # [tiles]
    strides,  # of rows of x, words and scales
    m,
    n,
    K: tl.constexpr,
    C: tl.constexpr,  # CodeConstants
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    x_stride, words_stride, scales_stride = strides
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    own, inside = tl.minimum(outputs, n - 1), (rows < m)[None, :]
    dims = tl.arange(0, C.words)
    x_ptrs = x_ptr + rows.to(tl.int64)[None, :] * x_stride + dims[:, None]
    word_ptrs = weight.words + own.to(tl.int64)[:, None] * words_stride + dims[None, :]
    groups = own // C.group_n
    NUM_RUNS: tl.constexpr = (K + C.run - 1) // C.run
    begin = tl.program_id(2) * NUM_RUNS // tl.num_programs(2)
    end = (tl.program_id(2) + 1) * NUM_RUNS // tl.num_programs(2)
    # Programs begin at different columns: few rows lie in few lines of the cache, which all would
    # read at once. One row, 28672 x 4096 in fp8: 48.8 us against 52.6.
    shift = tl.program_id(0) % tl.maximum(end - begin, 1)
    first = load_first(weight, groups, begin + shift, scales_stride, C)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    runs = begin, end, shift
    sums = sum_runs(word_ptrs, weight, groups, scales_stride, first, x_ptrs, inside, runs, K, C)
    write_outputs(tl.trans(sums), rows, outputs, bias_ptr, y_ptr, sums_ptr, counters_ptr, m, n)
