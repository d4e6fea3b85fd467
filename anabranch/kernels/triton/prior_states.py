"""States over other keys that a call goes on from, in the place of a merge after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from anabranch.kernels.softmax.merge_states import merge_part
from anabranch.kernels.softmax.online_softmax import LN_2, LOG2_E
from anabranch.state import AttentionState


class PriorArguments(NamedTuple):
    """A stack of states, their number a constant; outputs are contiguous in their last dimension.

    Flat, as Rows is, so that kernels can pass it on.
    """

    out: torch.Tensor
    out_step: int  # from state to state
    out_token: int
    out_head: int
    lse: torch.Tensor
    lse_step: int
    lse_token: int
    lse_head: int


def prior_arguments(prior: AttentionState) -> PriorArguments:
    """A stack [states, tokens, heads, dim] as a kernel takes it."""
    out = prior.out if prior.out.stride(-1) == 1 else prior.out.contiguous()
    return PriorArguments(out, *out.stride()[:3], prior.lse, *prior.lse.stride())


@triton.jit
def resume(state, prior, tokens, heads, mask, C: tl.constexpr):
    """A running state of some rows, with their prior states merged into it."""
    peak, total, acc = state
    running = (peak * LN_2, total, acc)
    dims = tl.arange(0, C.tiles.block_dv)
    inside = mask[:, None] & (dims < C.head_dim_v)[None, :]
    wide_tokens, wide_heads = tokens.to(tl.int64), heads.to(tl.int64)
    out_offsets = wide_tokens * prior.out_token + wide_heads * prior.out_head
    out_ptrs = prior.out + out_offsets[:, None] + dims[None, :]
    lse_ptrs = prior.lse + wide_tokens * prior.lse_token + wide_heads * prior.lse_head
    NUM_PRIORS: tl.constexpr = C.num_priors
    for _ in tl.static_range(NUM_PRIORS):
        out = tl.load(out_ptrs, inside, other=0.0)
        lse = tl.load(lse_ptrs, mask, other=float("-inf"))
        running = merge_part(running, out, lse)
        out_ptrs += prior.out_step
        lse_ptrs += prior.lse_step
    peak, total, acc = running
    return peak * LOG2_E, total, acc
