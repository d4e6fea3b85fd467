"""Where results go: rows (token, head in group) of a sequence, back to tokens and heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Output(NamedTuple):
    """The state a kernel writes."""

    out: torch.Tensor  # [num_tokens, num_heads, head_dim_v]
    out_strides: tuple[int, ...]
    lse: torch.Tensor  # [num_tokens, num_heads]
    lse_strides: tuple[int, ...]


@triton.jit
def write_rows(out, lse, rows, num_rows, q_start, kv_head, output, C: tl.constexpr):
    """Write finished rows of one kv head; those from `num_rows` on belong to nobody."""
    tokens = (q_start + rows // C.group).to(tl.int64)
    heads = kv_head * C.group + rows % C.group
    dims = tl.arange(0, C.block_dv)
    inside = rows < num_rows
    offsets = (tokens * output.out_strides[0] + heads * output.out_strides[1])[:, None]
    offsets += (dims * output.out_strides[2])[None, :]
    mask = inside[:, None] & (dims < C.head_dim_v)[None, :]
    tl.store(output.out + offsets, out.to(output.out.dtype.element_ty), mask)
    offsets = tokens * output.lse_strides[0] + heads * output.lse_strides[1]
    tl.store(output.lse + offsets, lse, inside)
