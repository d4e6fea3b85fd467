"""Rows as e4m3 codes with a scale each, in the order of columns that quantised weights have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.quantised_config import RUN
from anabranch.kernels.load.codec import LARGEST_E4M3, to_e4m3
from anabranch.launches.recorder import launch


def quantise_rows(
    x: torch.Tensor,  # [m, k], contiguous rows
    words: torch.Tensor,  # int16 [m, runs of k * RUN / 2], contiguous
    scales: torch.Tensor,  # float32 [m]
) -> None:
    """Write codes, zero after the last column, and what each row's are multiplied by."""
    (m, k), width = x.shape, words.shape[1]
    launch(
        quantise_rows_kernel,
        (m,),
        x,
        words,
        scales,
        x.stride(0),
        K=k,
        WIDTH=width,
        BLOCK=power_of_two(width),
        HALF=RUN // 2,
        num_warps=8 if width > 1024 else 4,
    )


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """A launch on meta tensors."""
    del shared_bytes

    def launch_case() -> None:
        x = torch.empty(64, 14336, dtype=torch.bfloat16, device="meta")
        words = torch.empty(64, 7168, dtype=torch.int16, device="meta")
        quantise_rows(x, words, torch.empty(64, device="meta"))

    yield "14336 columns", launch_case


@triton.jit
def quantise_rows_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [m, WIDTH]
    scales_ptr,  # [m]
    x_stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # the next power of two
    HALF: tl.constexpr,  # columns of a run whose codes are low bytes of words
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, BLOCK)
    columns = words // HALF * (2 * HALF) + words % HALF
    x_ptrs = x_ptr + row * x_stride + columns
    low = tl.load(x_ptrs, columns < K, other=0.0).to(tl.float32)
    high = tl.load(x_ptrs + HALF, columns + HALF < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)
    scale = tl.maximum(largest, 1e-12) / LARGEST_E4M3
    low, high = tl.div_rn(low, scale), tl.div_rn(high, scale)
    low, high = tl.clamp(low, -448.0, 448.0), tl.clamp(high, -448.0, 448.0)
    codes = to_e4m3(low).to(tl.int16) | (to_e4m3(high).to(tl.int16) << 8)
    tl.store(words_ptr + row * WIDTH + words, codes, words < WIDTH)
    tl.store(scales_ptr + row, scale)
