"""Queries that score latent rows as they are: a product for each head, and the rotary columns.

Bound by reading the weight, of which a program reads one tile. With OVERLAP it is on its way
before the kernel ahead has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.load.arguments import Rows
from anabranch.launches.recorder import launch

BLOCK_R = 64  # latent columns of a program


def absorb_queries(
    q: torch.Tensor,  # [num_tokens, num_heads, nope + rotary]
    w: torch.Tensor,  # [num_heads, nope or more, rank], contiguous in its last dimension
    absorbed: torch.Tensor,  # [num_tokens, num_heads, rank + rotary]
    *,
    overlap: bool,
) -> None:
    """Write q's first columns times the weight, then its rotary columns."""
    num_tokens, num_heads, head_dim = q.shape
    rank = w.shape[2]
    rotary = absorbed.shape[2] - rank
    nope = head_dim - rotary
    block_m = min(max(power_of_two(num_tokens), 16), 64)
    launch(
        absorb_queries_kernel,
        (triton.cdiv(rank, BLOCK_R), num_heads, triton.cdiv(num_tokens, block_m)),
        Rows(q, *q.stride()),
        w,
        Rows(absorbed, *absorbed.stride()),
        w.stride(0),
        w.stride(1),
        num_tokens,
        NOPE=nope,
        RANK=rank,
        ROTARY=rotary,
        BLOCK_M=block_m,
        BLOCK_N=max(power_of_two(nope), 16),
        BLOCK_R=BLOCK_R,
        BLOCK_ROTARY=power_of_two(rotary),
        OVERLAP=overlap,
        num_warps=4,
        num_stages=1,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def absorb_queries_kernel(
    q,  # Rows [num_tokens, num_heads, NOPE + ROTARY]
    w_ptr,  # [num_heads, NOPE, RANK]
    absorbed,  # Rows [num_tokens, num_heads, RANK + ROTARY]
    w_head,  # strides
    w_row,
    num_tokens,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # the powers of two that hold NOPE and ROTARY
    BLOCK_R: tl.constexpr,
    BLOCK_ROTARY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_N)
    columns = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    w_ptrs = w_ptr + head * w_head + dims[:, None] * w_row + columns[None, :]
    w = tl.load(w_ptrs, (dims < NOPE)[:, None] & (columns < RANK)[None, :], other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()

    tokens = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    from_rows = q.ptr + tokens * q.token + head * q.head
    to_rows = absorbed.ptr + tokens * absorbed.token + head * absorbed.head
    mask = tokens < num_tokens
    x = tl.load(from_rows + (dims * q.dim)[None, :], mask & (dims < NOPE)[None, :], other=0.0)
    y = tl.dot(x, w, input_precision="ieee").to(absorbed.ptr.dtype.element_ty)
    tl.store(to_rows + columns[None, :] * absorbed.dim, y, mask & (columns < RANK)[None, :])
    if tl.program_id(0) == 0:
        rotary = tl.arange(0, BLOCK_ROTARY)[None, :]
        is_rotary = mask & (rotary < ROTARY)
        turned = tl.load(from_rows + (NOPE + rotary) * q.dim, is_rotary)
        tl.store(to_rows + (RANK + rotary) * absorbed.dim, turned, is_rotary)
