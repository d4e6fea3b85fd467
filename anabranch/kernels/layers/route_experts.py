"""The experts of each token and their weights, by one launch: product, scores and choice.

Programs multiply parts of the weight. The one that ends last for its tokens adds up the sums of
all, in the order of their parts, and chooses.

Experts have places: each group of experts begins at a multiple of a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.config import power_of_two
from anabranch.kernels.layers.choose_experts import choose_experts
from anabranch.kernels.layers.expert_product import load_columns
from anabranch.kernels.layers.route_config import (
    RouteConfig,
)
from anabranch.launches.recorder import launch

ROWS = 16  # tokens whose experts are chosen at once; more do not fit into registers


@dataclass(frozen=True, slots=True)
class RouteConstants:
    """What the kernel is compiled for."""

    k: int
    num_experts: int
    num_groups: int
    top_groups: int
    top_k: int
    sigmoid: bool  # of logits are the scores; otherwise their softmax
    normalised: bool
    groups: int  # the powers of two that hold num_groups and top_k
    places: int
    slots: int
    rows: int  # tokens whose experts are chosen at once,
    chunks: int  # and how often
    block_m: int
    block_e: int
    block_k: int
    splits: int
    overlap: bool

    @property
    def span(self) -> int:
        """Places of a group."""
        return self.places // self.groups

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


def num_places(num_experts: int, num_groups: int) -> int:
    """Columns that hold the scores of all experts; a product has 16 at least."""
    return max(power_of_two(num_groups) * power_of_two(num_experts // num_groups), 16)


def route_experts(
    x: torch.Tensor,  # [num_tokens, k], contiguous rows
    w: torch.Tensor,  # [num_experts, k], contiguous rows
    bias: torch.Tensor | None,  # [num_experts], added to scores for the choice only
    arrived: torch.Tensor | None,  # int32, zeros, one for every block of tokens; left as zeros
    experts: torch.Tensor,  # int32 [num_tokens, top_k]
    weights: torch.Tensor,  # float32 [num_tokens, top_k]
    config: RouteConfig,
    *,
    num_groups: int,
    top_groups: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> None:
    """Write the experts of each token, best first, and their weights."""
    num_tokens, num_experts = x.shape[0], w.shape[0]
    num_blocks, places = (
        triton.cdiv(num_tokens, config.block_m),
        num_places(num_experts, num_groups),
    )
    splits = min(config.splits, triton.cdiv(x.shape[1], config.block_k))
    parts = splits * (places // config.block_e)
    sums = None
    if parts > 1:
        shape = splits, num_tokens, places
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        if arrived is None or arrived.shape[0] < num_blocks:
            arrived = torch.zeros(num_blocks, dtype=torch.int32, device=x.device)
    constants = RouteConstants(
        k=x.shape[1],
        num_experts=num_experts,
        num_groups=num_groups,
        top_groups=top_groups,
        top_k=experts.shape[1],
        sigmoid=sigmoid,
        normalised=normalised,
        groups=power_of_two(num_groups),
        places=places,
        slots=power_of_two(experts.shape[1]),
        rows=min(ROWS, power_of_two(num_tokens)),
        chunks=config.block_m // ROWS,
        block_m=config.block_m,
        block_e=config.block_e,
        block_k=min(config.block_k, max(power_of_two(x.shape[1]), 16)),
        splits=splits,
        overlap=config.overlap,
    )
    launch(
        route_experts_kernel,
        (num_blocks, parts),
        x,
        w,
        bias,
        sums,
        arrived,
        experts,
        weights,
        x.stride(0),
        w.stride(0),
        num_tokens,
        scale,
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if config.overlap else {}),
    )


@triton.jit
def multiply_tile(x, w, sums):
    """Products of 16 bits are exact in float32; those of float32 are computed as such."""
    if x.dtype == w.dtype:
        return tl.dot(x, w, sums, input_precision="ieee")
    else:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), sums, input_precision="ieee")


@triton.jit
def add_sums(sums_ptr, tokens, num_tokens, PLACES: tl.constexpr, SPLITS: tl.constexpr):
    """The logits [rows, PLACES] of some tokens, in the order of the parts of their columns."""
    places = tl.arange(0, PLACES)
    mask = (tokens < num_tokens)[:, None]
    logits = tl.zeros([tokens.shape[0], PLACES], tl.float32)
    for part in tl.static_range(SPLITS):
        rows = (tokens + part * num_tokens).to(tl.int64)
        ptrs = sums_ptr + rows[:, None] * PLACES + places[None, :]
        logits += tl.load(ptrs, mask, other=0.0, cache_modifier=".cg")
    return logits


@triton.jit
def write_choice(
    logits, bias_ptr, experts_ptr, weights_ptr, tokens, num_tokens, scale, C: tl.constexpr
):
    """Write the experts of some tokens with these logits [rows, places], and their weights."""
    places, slots = tl.arange(0, logits.shape[1]), tl.arange(0, C.slots)
    is_expert = (places % C.span < C.group_size) & (places // C.span < C.num_groups)
    bias = tl.zeros([logits.shape[1]], tl.float32)
    if bias_ptr is not None:
        found = places // C.span * C.group_size + places % C.span
        bias = tl.load(bias_ptr + found, is_expert, other=0.0).to(tl.float32)
    chosen, weights = choose_experts(logits, bias, is_expert, scale, C)
    offsets = tokens.to(tl.int64)[:, None] * C.top_k + slots[None, :]
    mask = (tokens < num_tokens)[:, None] & (slots < C.top_k)[None, :]
    tl.store(experts_ptr + offsets, chosen // C.span * C.group_size + chosen % C.span, mask)
    tl.store(weights_ptr + offsets, weights, mask)


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def route_experts_kernel(
    x_ptr,  # [num_tokens, k]
    w_ptr,  # [num_experts, k]
    bias_ptr,  # [num_experts] or None
    sums_ptr,  # [splits, num_tokens, places], or None if a program has all of a token's
    arrived_ptr,  # [num_blocks], or None
    experts_ptr,  # [num_tokens, top_k]
    weights_ptr,  # [num_tokens, top_k]
    x_stride,
    w_stride,
    num_tokens,
    scale,
    C: tl.constexpr,  # RouteConstants
):
    K: tl.constexpr = C.k
    PLACES: tl.constexpr = C.places
    SPLITS: tl.constexpr = C.splits
    BLOCK_M: tl.constexpr = C.block_m
    BLOCK_E: tl.constexpr = C.block_e
    BLOCK_K: tl.constexpr = C.block_k
    SPAN: tl.constexpr = C.span
    GROUP_SIZE: tl.constexpr = C.group_size
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    PART_K: tl.constexpr = (TILES + SPLITS - 1) // SPLITS * BLOCK_K
    block = tl.program_id(0)
    split, first_place = tl.program_id(1) % SPLITS, tl.program_id(1) // SPLITS * BLOCK_E
    dims = tl.arange(0, BLOCK_K)
    own = first_place + tl.arange(0, BLOCK_E)
    is_own = (own % SPAN < GROUP_SIZE) & (own // SPAN < C.num_groups)
    w_rows = own // SPAN * GROUP_SIZE + own % SPAN
    w_ptrs = w_ptr + (w_rows * w_stride)[None, :] + dims[:, None]
    tokens = block * BLOCK_M + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + dims[None, :]
    mask = (tokens < num_tokens)[:, None]
    begin = split * PART_K

    sums = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if PART_K == BLOCK_K:
        w = load_columns(w_ptrs, is_own[None, :], begin, dims[:, None], K, BLOCK_K)
        if C.overlap:
            gdc_launch_dependents()
            gdc_wait()
        x = load_columns(x_ptrs, mask, begin, dims[None, :], K, BLOCK_K)
        sums = multiply_tile(x, w, sums)
    else:
        if C.overlap:
            gdc_wait()
        for first in range(begin, tl.minimum(begin + PART_K, K), BLOCK_K):
            x = load_columns(x_ptrs, mask, first, dims[None, :], K, BLOCK_K)
            w = load_columns(w_ptrs, is_own[None, :], first, dims[:, None], K, BLOCK_K)
            sums = multiply_tile(x, w, sums)

    PARTS: tl.constexpr = SPLITS * (PLACES // BLOCK_E)
    if PARTS > 1:
        rows = split.to(tl.int64) * num_tokens + tokens
        tl.store(sums_ptr + rows[:, None] * PLACES + own[None, :], sums, mask)
        tl.debug_barrier()  # every warp's stores come before the release below
        before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if before < PARTS - 1:
            return
        tl.store(arrived_ptr + block, 0)
        for chunk in range(C.chunks):
            some = block * BLOCK_M + chunk * C.rows + tl.arange(0, C.rows)
            logits = add_sums(sums_ptr, some, num_tokens, PLACES, SPLITS)
            write_choice(logits, bias_ptr, experts_ptr, weights_ptr, some, num_tokens, scale, C)
    else:
        write_choice(sums, bias_ptr, experts_ptr, weights_ptr, tokens, num_tokens, scale, C)
