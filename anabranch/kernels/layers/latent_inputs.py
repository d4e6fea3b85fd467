"""Queries and latent rows from what a layer projects: rotated, and the latent part normalised.

The first program of a token writes its row, the others some heads of its query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.load.addressing import Rows
from anabranch.launches.recorder import launch

BLOCK_H = 8  # heads of a program


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
        NOPE=nope,
        RANK=rank,
        HALF=rotary // 2,
        NEIGHBOURS=neighbours,
        BLOCK_H=min(BLOCK_H, power_of_two(num_heads)),
        BLOCK_N=power_of_two(max(nope, 1)),
        BLOCK_R=power_of_two(rank),
        BLOCK_HALF=power_of_two(rotary // 2),
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def compile_cases(shared_bytes: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """A launch on meta tensors."""

    def launch() -> None:
        joined = torch.empty(4, 16 * 192 + 576, dtype=torch.bfloat16, device="meta")
        q, latent = joined[:, : 16 * 192].view(4, 16, 192), joined[:, 16 * 192 :]
        cos = torch.empty(4, 32, device="meta")
        latent_inputs(
            q, latent, cos, cos, joined[0, :512], torch.empty_like(q), torch.empty_like(latent),
            epsilon=1e-6, neighbours=True, overlap=shared_bytes >= 227 * 1024,
        )  # fmt: skip

    yield "16 heads", launch


@triton.jit
def load_pairs(ptrs, mask, pairs, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Both columns [rows, BLOCK_HALF] of each pair, in float32."""
    STEP: tl.constexpr = 2 if NEIGHBOURS else 1
    a = tl.load(ptrs + pairs * STEP, mask, other=0.0)
    b = tl.load(ptrs + pairs * STEP + (1 if NEIGHBOURS else HALF), mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def rotate_pairs(
    source, target, mask, cos, sin, pairs, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """Write pairs rotated, the first of all pairs before the second."""
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
    q,  # Rows [num_tokens, num_heads, NOPE + 2 HALF]
    latent_ptr,  # [num_tokens, RANK + 2 HALF]
    cos_ptr,  # [num_tokens, HALF]
    sin_ptr,  # [num_tokens, HALF]
    norm_ptr,  # [RANK]
    q_out_ptr,  # [num_tokens, num_heads, NOPE + 2 HALF]
    rows_ptr,  # [num_tokens, RANK + 2 HALF]
    latent_stride,
    angle_stride,
    num_heads,
    epsilon,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,  # a pair is two columns side by side, not of two halves
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,  # the powers of two that hold NOPE, RANK and HALF
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK_HALF)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    cos = tl.load(cos_ptr + token * angle_stride + pairs, pairs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + pairs, pairs < HALF, other=0.0).to(tl.float32)
    if part == 0:
        source = latent_ptr + token * latent_stride
        target = rows_ptr + token * (RANK + 2 * HALF)
        normalise(source, target, norm_ptr, epsilon, RANK, BLOCK_R)
        rotate_pairs(source + RANK, target + RANK, pairs < HALF, cos, sin, pairs, HALF, NEIGHBOURS)
    else:
        heads = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        from_heads = q.ptr + token * q.token + heads * q.head
        to_heads = q_out_ptr + (token * num_heads + heads) * (NOPE + 2 * HALF)
        dims = tl.arange(0, BLOCK_N)[None, :]
        mask = (heads < num_heads) & (dims < NOPE)
        tl.store(to_heads + dims, tl.load(from_heads + dims, mask), mask)
        rotate_pairs(
            from_heads + NOPE, to_heads + NOPE, (heads < num_heads) & (pairs < HALF)[None, :],
            cos[None, :], sin[None, :], pairs[None, :], HALF, NEIGHBOURS,
        )  # fmt: skip
