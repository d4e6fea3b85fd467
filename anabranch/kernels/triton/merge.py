"""Merge states: each program merges a tile of rows over all parts, separate ones or a stack.

Parts are loaded several at a time, all before the first is used: one after the other they would
wait for memory one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.kernels.config import power_of_two, select_merge
from anabranch.kernels.softmax.merge_states import finish_merge, merge_part
from anabranch.kernels.softmax.online_softmax import empty_state
from anabranch.kernels.triton.runtime import require_triton_device
from anabranch.launches.recorder import launch
from anabranch.state import AttentionState


def load(device: torch.device) -> object:
    """The launcher, or an error that says why this device cannot run it."""
    require_triton_device(device)
    return merge


def merge(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the merge of `states`, or of dimension 0 of the only one, into `out` and `lse`."""
    num_tokens, num_heads, head_dim = out.shape
    num_rows = num_tokens * num_heads
    config = select_merge(head_dim)
    launch(
        merge_kernel,
        (-(-num_rows // config.block_rows),),
        tuple(state.out for state in states),
        tuple(state.lse for state in states),
        tuple(state.out.stride() for state in states),
        tuple(state.lse.stride() for state in states),
        states[0].out.shape[0] if stacked else 0,
        out,
        lse,
        out.stride(),
        None if lse is None else lse.stride(),
        num_rows,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=config.block_rows,
        BLOCK_D=power_of_two(head_dim),
        STACKED=stacked,
        num_warps=config.num_warps,
    )


@triton.jit
def load_part(ptrs, strides, lse_strides, tokens, heads, dims, row_mask, dim_mask):
    """Rows of one part and their LSEs; rows outside are those of the empty state."""
    out_ptr, lse_ptr = ptrs
    row_offsets = tokens * strides[0] + heads * strides[1]
    offsets = row_offsets[:, None] + (dims * strides[2])[None, :]
    out = tl.load(out_ptr + offsets, row_mask[:, None] & dim_mask[None, :], other=0.0)
    lse_offsets = tokens * lse_strides[0] + heads * lse_strides[1]
    return out, tl.load(lse_ptr + lse_offsets, row_mask, other=float("-inf"))


@triton.jit(do_not_specialize=["num_parts", "num_rows", "num_heads"])
def merge_kernel(
    outs,  # a tuple of [num_tokens, num_heads, head_dim], or of one [num_parts, ...] if STACKED
    lses,  # likewise [num_tokens, num_heads]
    outs_strides,
    lses_strides,
    num_parts,  # of the stack
    merged_ptr,  # [num_tokens, num_heads, head_dim]
    merged_lse_ptr,  # [num_tokens, num_heads] or None
    merged_strides,
    merged_lse_strides,
    num_rows,  # num_tokens * num_heads
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # the power of two that holds HEAD_DIM
    STACKED: tl.constexpr,
    BATCH: tl.constexpr = 4,  # parts of a stack loaded at a time
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    tokens, heads = rows // num_heads, rows % num_heads
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM

    state = empty_state(BLOCK_ROWS, BLOCK_D)
    if STACKED:
        strides, lse_strides = outs_strides[0], lses_strides[0]
        out_ptr, lse_ptr = outs[0], lses[0]
        out_step = tl.zeros([], tl.int64) + strides[0]
        lse_step = tl.zeros([], tl.int64) + lse_strides[0]
        for first in range(0, num_parts, BATCH):
            parts = ()
            for i in tl.static_range(BATCH):
                mask = row_mask & (first + i < num_parts)
                ptrs = out_ptr + i * out_step, lse_ptr + i * lse_step
                part = load_part(
                    ptrs, strides[1:], lse_strides[1:], tokens, heads, dims, mask, dim_mask
                )
                parts = parts + (part,)  # noqa: RUF005 (the kernel language has no unpacking)
            for i in tl.static_range(BATCH):
                state = merge_part(state, parts[i][0], parts[i][1])
            out_ptr += BATCH * out_step
            lse_ptr += BATCH * lse_step
    else:
        parts = ()
        for i in tl.static_range(len(outs)):
            ptrs, strides, lse_strides = (outs[i], lses[i]), outs_strides[i], lses_strides[i]
            part = load_part(ptrs, strides, lse_strides, tokens, heads, dims, row_mask, dim_mask)
            parts = parts + (part,)  # noqa: RUF005
        for i in tl.static_range(len(outs)):
            state = merge_part(state, parts[i][0], parts[i][1])
    out, lse = finish_merge(state)

    tl.debug_barrier()  # in place, another warp may still have to read this LSE
    offsets = (tokens * merged_strides[0] + heads * merged_strides[1])[:, None]
    offsets += (dims * merged_strides[2])[None, :]
    mask = row_mask[:, None] & dim_mask[None, :]
    tl.store(merged_ptr + offsets, out.to(merged_ptr.dtype.element_ty), mask)
    if merged_lse_ptr is not None:
        lse_offsets = tokens * merged_lse_strides[0] + heads * merged_lse_strides[1]
        tl.store(merged_lse_ptr + lse_offsets, lse, row_mask)
