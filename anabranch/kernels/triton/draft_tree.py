"""Masks and positions of draft trees: one program for each tree, all of it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from anabranch.launches.recorder import launch

MAX_NODES: tl.constexpr = tl.constexpr(64)
DOUBLINGS: tl.constexpr = tl.constexpr(6)  # 2^6 steps lead from any of 64 nodes to its root


def make_draft_tree(
    parents: torch.Tensor,  # int32 [num_tokens]
    starts: torch.Tensor,  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor | None,  # int32 [num_seqs]
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask bool [num_tokens, width] and positions int32 [num_tokens]."""
    num_tokens, num_seqs = parents.shape[0], starts.shape[0] - 1
    mask = torch.zeros((num_tokens, width), dtype=torch.bool, device=parents.device)
    positions = torch.zeros(num_tokens, dtype=torch.int32, device=parents.device)
    if num_seqs:
        written = mask.view(torch.uint8), positions
        given = (parents, starts, seq_lens, *written, num_tokens, width)
        launch(draft_tree_kernel, (num_seqs,), *given, num_warps=4)
    return mask, positions


@triton.jit(do_not_specialize=["num_tokens", "width"])
def draft_tree_kernel(
    parents_ptr,  # [num_tokens], contiguous
    starts_ptr,  # [num_seqs + 1]
    seq_lens_ptr,  # [num_seqs] or None
    mask_ptr,  # bytes [num_tokens, width]
    positions_ptr,  # [num_tokens]
    num_tokens,
    width,
):
    """The ancestors of all nodes: steps to a parent, doubled until every root is reached."""
    seq = tl.program_id(0)
    start = tl.load(starts_ptr + seq)
    stop = tl.minimum(tl.load(starts_ptr + seq + 1), num_tokens)
    nodes = tl.arange(0, MAX_NODES)
    inside = nodes < tl.minimum(stop - start, MAX_NODES)
    parents = tl.load(parents_ptr + start + nodes, inside, other=-1)
    columns = nodes[None, :]
    reached = ((nodes[:, None] == columns) | (parents[:, None] == columns)).to(tl.float16)
    for _ in tl.static_range(DOUBLINGS):
        reached = (tl.dot(reached, reached) > 0).to(tl.float16)
    depth = tl.sum(reached.to(tl.int32), 1) - 1
    context = 0
    if seq_lens_ptr is not None:
        context = tl.load(seq_lens_ptr + seq) - (stop - start)
    tl.store(positions_ptr + start + nodes, context + depth, inside)
    rows = (start + nodes).to(tl.int64) * width
    shown = inside[:, None] & (columns < width)
    tl.store(mask_ptr + rows[:, None] + columns, (reached > 0).to(tl.uint8), shown)
