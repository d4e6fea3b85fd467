"""Queries and latent rows from what a layer projects: rotated, and the latent part normalised.

The first program of a token writes its row, the others some heads of its query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.load.arguments import Rows
from anabranch.launches.recorder import launch

BLOCK_H = 8  # heads of a program


@dataclass(frozen=True, slots=True)
class LatentInputConstants:
    """What the kernel is compiled for."""

    nope: int
    rank: int
    half: int
    neighbours: bool  # a pair is two columns side by side, not of two halves
    block_h: int
    block_n: int  # the powers of two that hold nope, rank and half
    block_r: int
    block_half: int
    overlap: bool


def latent_inputs(
    q: torch.Tensor,  # [num_tokens, num_heads, nope + rotary], contiguous heads
    latent: torch.Tensor,  # [num_tokens, rank + rotary], contiguous rows
    cos: torch.Tensor,  # [num_tokens, rotary / 2] or more columns, contiguous rows
    sin: torch.Tensor,  # as cos
    norm: torch.Tensor,  # [rank], the weight of the norm
    q_out: torch.Tensor,  # as q
    rows: torch.Tensor,  # as latent
    *,
    epsilon: float,
    neighbours: bool,
    overlap: bool,
) -> None:
    """Write queries with rotated columns into `q_out`, normalised and rotated rows into `rows`."""
    num_tokens, num_heads, head_dim = q.shape
    rank = norm.shape[0]
    rotary = latent.shape[1] - rank
    nope = head_dim - rotary
    constants = LatentInputConstants(
        nope=nope,
        rank=rank,
        half=rotary // 2,
        neighbours=neighbours,
        block_h=min(BLOCK_H, power_of_two(num_heads)),
        block_n=power_of_two(max(nope, 1)),
        block_r=power_of_two(rank),
        block_half=power_of_two(rotary // 2),
        overlap=overlap,
    )
    launch(
        latent_inputs_kernel,
        (num_tokens, 1 + triton.cdiv(num_heads, BLOCK_H)),
        Rows(q, *q.stride()),
        latent,
        cos,
        sin,
        norm,
        q_out,
        rows,
        latent.stride(0),
        cos.stride(0),
        num_heads,
        epsilon,
        constants,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit
def load_pairs(ptrs, mask, pairs, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Both columns [rows, BLOCK_HALF] of each pair, in float32."""
    STEP: tl.constexpr = 2 if NEIGHBOURS else 1
    a = tl.load(ptrs + pairs * STEP, mask, other=0.0)
    b = tl.load(ptrs + pairs * STEP + (1 if NEIGHBOURS else HALF), mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def rotate_pairs(
    source,
    target,
    mask,
    columns,  # cosine and sine of each pair, and the pairs
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """Write pairs rotated, the first of all pairs before the second."""
    cos, sin, pairs = columns
    a, b = load_pairs(source, mask, pairs, HALF, NEIGHBOURS)
    kind: tl.constexpr = target.dtype.element_ty
    tl.store(target + pairs, (a * cos - b * sin).to(kind), mask)
    tl.store(target + HALF + pairs, (b * cos + a * sin).to(kind), mask)


@triton.jit
def normalise(source, target, norm_ptr, epsilon, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Write the root-mean-square norm of RANK columns, rounded twice as by the model."""
    kind: tl.constexpr = target.dtype.element_ty
    dims = tl.arange(0, BLOCK_R)
    x = tl.load(source + dims, dims < RANK, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + dims, dims < RANK, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + epsilon)
    y = weight * x.to(kind).to(tl.float32)
    tl.store(target + dims, y.to(kind), dims < RANK)


@triton.jit(do_not_specialize=["num_heads", "epsilon"])
def latent_inputs_kernel(
    q,  # Rows [num_tokens, num_heads, nope + 2 half]
    latent_ptr,  # [num_tokens, rank + 2 half]
    cos_ptr,  # [num_tokens, half]
    sin_ptr,  # [num_tokens, half]
    norm_ptr,  # [rank]
    q_out_ptr,  # [num_tokens, num_heads, nope + 2 half]
    rows_ptr,  # [num_tokens, rank + 2 half]
    latent_stride,
    angle_stride,
    num_heads,
    epsilon,
    C: tl.constexpr,  # LatentInputConstants
):
    NOPE: tl.constexpr = C.nope
    RANK: tl.constexpr = C.rank
    HALF: tl.constexpr = C.half
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, C.block_half)
    if C.overlap:
        gdc_launch_dependents()
        gdc_wait()
    cos = tl.load(cos_ptr + token * angle_stride + pairs, pairs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + pairs, pairs < HALF, other=0.0).to(tl.float32)
    if part == 0:
        source = latent_ptr + token * latent_stride
        target = rows_ptr + token * (RANK + 2 * HALF)
        normalise(source, target, norm_ptr, epsilon, RANK, C.block_r)
        columns = cos, sin, pairs
        rotate_pairs(source + RANK, target + RANK, pairs < HALF, columns, HALF, C.neighbours)
    else:
        heads = (part - 1) * C.block_h + tl.arange(0, C.block_h)[:, None]
        from_heads = q.ptr + token * q.token + heads * q.head
        to_heads = q_out_ptr + (token * num_heads + heads) * (NOPE + 2 * HALF)
        dims = tl.arange(0, C.block_n)[None, :]
        mask = (heads < num_heads) & (dims < NOPE)
        tl.store(to_heads + dims, tl.load(from_heads + dims, mask), mask)
        inside = (heads < num_heads) & (pairs < HALF)[None, :]
        tiles = cos[None, :], sin[None, :], pairs[None, :]
        rotate_pairs(from_heads + NOPE, to_heads + NOPE, inside, tiles, HALF, C.neighbours)
