"""A quantised weight as a plain one, for products of so many rows that this costs little."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.layers.quantised_config import CodeConstants
from anabranch.kernels.layers.quantised_product import CodeArguments
from anabranch.kernels.layers.widen_codes import widen_codes
from anabranch.launches.recorder import launch

BLOCK_N, NUM_WARPS = 64, 4


def expand_codes(weight: CodeArguments, w: torch.Tensor, constants: CodeConstants) -> None:
    """Write the numbers of a weight into `w` [n, k], contiguous."""
    n, k = w.shape
    launch(
        expand_codes_kernel,
        (triton.cdiv(n, BLOCK_N), triton.cdiv(k, constants.run)),
        weight,
        w,
        (weight.words.stride(0), weight.scales.stride(0)),
        n,
        K=k,
        C=constants,
        BLOCK_N=BLOCK_N,
        num_warps=NUM_WARPS,
    )


@triton.jit
def load_spread(ptr, outputs, first, stride, K: tl.constexpr, C: tl.constexpr):
    """Scales or zeros of a part of a run: for each output, and column where they differ there."""
    ptrs = ptr + outputs // C.group_n
    if C.steps == 1:
        place = (tl.minimum(first, K - 1) // C.group_k).to(tl.int64) * stride
        return tl.load(ptrs + place).to(tl.float32)[:, None]
    else:
        columns = tl.minimum(first + tl.arange(0, C.words), K - 1)
        places = (columns // C.group_k).to(tl.int64) * stride
        return tl.load(ptrs[:, None] + places[None, :]).to(tl.float32)


@triton.jit
def expand_codes_kernel(
    weight,  # CodeArguments
    w_ptr,  # [n, K]
    strides,  # of rows of words and scales
    n,
    K: tl.constexpr,
    C: tl.constexpr,  # CodeConstants
    BLOCK_N: tl.constexpr,
):
    words_stride, scales_stride = strides
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    rows, run = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    own = tl.minimum(rows, n - 1)
    columns = run * C.words + tl.arange(0, C.words)
    words = tl.load(weight.words + own.to(tl.int64)[:, None] * words_stride + columns[None, :])
    none = tl.full([BLOCK_N, 1], C.zero, tl.float32)
    parts = widen_codes(words, none, DTYPE, C)
    PARTS: tl.constexpr = C.parts
    for part in tl.static_range(PARTS):
        first = run * C.run + part * C.words
        columns = first + tl.arange(0, C.words)
        numbers = parts[part].to(tl.float32)
        if weight.zeros is not None:
            numbers -= load_spread(weight.zeros, own, first, scales_stride, K, C) - C.zero
        numbers *= load_spread(weight.scales, own, first, scales_stride, K, C)
        mask = (rows < n)[:, None] & (columns < K)[None, :]
        ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(ptrs, numbers.to(DTYPE), mask)
