"""Outputs over latent rows become values of every head: a product for each head.

Bound by reading the weight, of which a program reads some rows at once. With OVERLAP they are on
their way before the kernel ahead has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.triton.addressing import Rows

BLOCK_V = 16  # columns of values of a program
BLOCK_R = 512  # latent columns read at once


def project_values(
    latent: torch.Tensor,  # [num_tokens, num_heads, rank]
    w: torch.Tensor,  # [num_heads, head_dim_v, rank], contiguous in its last dimension
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim_v]
    *,
    overlap: bool,
) -> None:
    """Write each head's rows times its weight, transposed."""
    num_tokens, num_heads, rank = latent.shape
    head_dim_v = w.shape[1]
    block_m = 16 if num_tokens <= 16 else 32
    project_values_kernel[
        (triton.cdiv(head_dim_v, BLOCK_V), num_heads, triton.cdiv(num_tokens, block_m))
    ](
        Rows(latent, *latent.stride()),
        w,
        Rows(out, *out.stride()),
        w.stride(0),
        w.stride(1),
        num_tokens,
        RANK=rank,
        HEAD_DIM_V=head_dim_v,
        BLOCK_M=block_m,
        BLOCK_V=BLOCK_V,
        BLOCK_R=min(max(power_of_two(rank), 16), BLOCK_R),
        OVERLAP=overlap,
        num_warps=4,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """A launch on meta tensors."""

    def launch() -> None:
        latent, w, out = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta")
            for shape in ((64, 16, 512), (16, 128, 512), (64, 16, 128))
        )
        project_values(latent, w, out, overlap=shared_bytes >= 227 * 1024)

    yield "64 tokens", launch


@triton.jit
def load_weight_tile(ptrs, mask, columns, first, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """BLOCK_R columns, zero after the last."""
    if RANK % BLOCK_R != 0:
        mask = mask & (first + columns < RANK)
    return tl.load(ptrs + first, mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def project_values_kernel(
    latent,  # Rows [num_tokens, num_heads, RANK]
    w_ptr,  # [num_heads, HEAD_DIM_V, RANK]
    out,  # Rows [num_tokens, num_heads, HEAD_DIM_V]
    w_head,  # strides
    w_row,
    num_tokens,
    RANK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_R)
    dims = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = (dims < HEAD_DIM_V)[None, :]
    w_ptrs = w_ptr + head * w_head + dims[None, :] * w_row + columns[:, None]
    w = load_weight_tile(w_ptrs, is_value, columns[:, None], 0, RANK, BLOCK_R)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    tokens = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    mask = tokens < num_tokens
    rows = latent.ptr + tokens * latent.token + head * latent.head
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in tl.static_range(0, RANK, BLOCK_R):
        if first > 0:
            w = load_weight_tile(w_ptrs, is_value, columns[:, None], first, RANK, BLOCK_R)
        within = mask & (first + columns < RANK)[None, :]
        x = tl.load(rows + ((first + columns) * latent.dim)[None, :], within, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    y = sums.to(out.ptr.dtype.element_ty)
    ptrs = out.ptr + tokens * out.token + head * out.head + dims[None, :] * out.dim
    tl.store(ptrs, y, mask & is_value)
