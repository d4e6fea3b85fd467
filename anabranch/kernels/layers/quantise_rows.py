"""Rows as e4m3 codes, in the order of columns that quantised weights have.

A row has one scale, or one for each run of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.quantised_config import RUN
from anabranch.kernels.load.codec import LARGEST_E4M3, to_e4m3
from anabranch.launches.recorder import launch


def quantise_rows(
    x: torch.Tensor,  # [m, k], contiguous rows
    words: torch.Tensor,  # int16 [m, runs of k * RUN / 2], contiguous
    scales: torch.Tensor,  # float32 [m] or [runs, m or more], contiguous
    *,
    overlap: bool = False,  # launched before the kernel ahead has ended
) -> None:
    """Write codes, zero after the last column, and what each row's are multiplied by."""
    (m, k), width = x.shape, words.shape[1]
    launch(
        quantise_rows_kernel,
        (m,),
        x,
        words,
        scales,
        (x.stride(0), scales.stride(0)),
        K=k,
        WIDTH=width,
        BLOCK=power_of_two(width),
        HALF=RUN // 2,
        BY_RUN=scales.dim() == 2,
        OVERLAP=overlap,
        num_warps=8 if width > 1024 else 4,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def quantise_rows_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [m, WIDTH]
    scales_ptr,  # [m] or [runs, m or more]
    strides,  # of rows of x, and of runs of scales
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # the next power of two
    HALF: tl.constexpr,  # columns of a run whose codes are low bytes of words
    BY_RUN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    x_stride, scales_stride = strides
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, BLOCK)
    columns = words // HALF * (2 * HALF) + words % HALF
    x_ptrs = x_ptr + row * x_stride + columns
    low = tl.load(x_ptrs, columns < K, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, columns + HALF < K, other=0.0).to(tl.float32)

    GROUP: tl.constexpr = HALF if BY_RUN else BLOCK
    low, high = tl.reshape(low, [BLOCK // GROUP, GROUP]), tl.reshape(high, [BLOCK // GROUP, GROUP])
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    scales = tl.maximum(largest, 1e-12) / LARGEST_E4M3
    wide = tl.broadcast_to(scales[:, None], [BLOCK // GROUP, GROUP])
    low, high = tl.div_rn(low, wide), tl.div_rn(high, wide)
    low, high = tl.clamp(low, -448.0, 448.0), tl.clamp(high, -448.0, 448.0)
    codes = to_e4m3(low).to(tl.int16) | (to_e4m3(high).to(tl.int16) << 8)
    codes = tl.reshape(codes, [BLOCK])
    tl.store(words_ptr + row * WIDTH + words, codes, words < WIDTH)
    groups = tl.arange(0, BLOCK // GROUP)
    tl.store(scales_ptr + groups * scales_stride + row, scales, groups * GROUP < WIDTH)
