"""merge_across(): states whose keys lie on different ranks become the state over all keys.

Every row is merged once, by one rank or by all in the same order, with the merge that splits on one
GPU use; so all ranks see the same bits. Shapes alone decide what is sent, so a CUDA graph can
capture it. A collective moves outputs and LSEs together.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from anabranch.distributed.rank_group import RankGroup, check_agreement, find_group
from anabranch.distributed.state_buffer import StateBuffer
from anabranch.merge import merge
from anabranch.shapes import FLOATS, check_device, check_dtype
from anabranch.state import AttentionState

HeadLayout = Literal["all", "scattered"]
HEAD_LAYOUTS = ("all", "scattered")


def merge_across(
    state: AttentionState,
    group: dist.ProcessGroup | None = None,
    *,
    heads: HeadLayout = "all",
    check: bool = False,
) -> AttentionState:
    """Merge the states of all ranks of `group`, which are over disjoint sets of keys.

    state   out [..., num_heads, head_dim], of the same shape and dtype on every rank; a rank
            without keys passes the empty state, out 0 and lse -inf
    group   of torch.distributed; the default group if None
    heads   "all": every rank gets all heads; "scattered": rank r gets the r-th of num_ranks equal
            parts of the heads, out [..., num_heads / num_ranks, head_dim]
    check   also compare shapes and dtypes between ranks, which waits for all of them

    A row, one token with one head, has b = head_dim * itemsize + 4 bytes. Each rank receives
    b * (N - 1) / N a row when scattered, in one collective, and twice that for all heads, in two
    (in one for two ranks). A sum of the outputs alone would move b - 4 in the place of b.
    Not differentiable.
    """
    ranks = find_group(group)
    _check(state, heads, ranks)
    if check:
        check_agreement(ranks, shape=tuple(state.out.shape), dtype=state.out.dtype, heads=heads)
    if heads == "scattered":
        return _merge_scattered(state, ranks)
    # Two ranks exchange as much either way, and one collective is quicker than two.
    return _merge_gathered(state, ranks) if ranks.num_ranks <= 2 else _merge_rows(state, ranks)


def _check(state: AttentionState, heads: str, ranks: RankGroup) -> None:
    out, lse = state
    if heads not in HEAD_LAYOUTS:
        raise ValueError(f"heads must be one of {', '.join(HEAD_LAYOUTS)}, got {heads!r}")
    if out.dim() < 2 or lse.shape != out.shape[:-1]:
        raise ValueError(
            "state must have out [..., num_heads, head_dim] and lse [..., num_heads], "
            f"got shapes {tuple(out.shape)} and {tuple(lse.shape)}"
        )
    check_dtype("state.out", out, FLOATS)
    check_dtype("state.lse", lse, (torch.float32,))
    check_device("state.lse", lse, out.device)
    if (out.requires_grad or lse.requires_grad) and torch.is_grad_enabled():
        raise ValueError("state requires grad; merge_across is for inference, detach it")
    if heads == "scattered" and out.shape[-2] % ranks.num_ranks:
        raise ValueError(f"{out.shape[-2]} heads cannot be scattered over {ranks.num_ranks} ranks")


def _merge_scattered(state: AttentionState, ranks: RankGroup) -> AttentionState:
    """Each rank receives its own heads from all ranks and merges them."""
    out, lse = state
    cut = (*lse.shape[:-1], ranks.num_ranks, lse.shape[-1] // ranks.num_ranks)
    out = out.reshape(*cut, out.shape[-1]).movedim(-3, 0)
    lse = lse.reshape(cut).movedim(-2, 0)
    buffer = StateBuffer.allocate(ranks.num_ranks, tuple(out.shape[1:]), out.dtype, out.device)
    _copy(AttentionState(out, lse), buffer.states())
    return merge(buffer.exchange(ranks.group).states(), dim=0)


def _merge_gathered(state: AttentionState, ranks: RankGroup) -> AttentionState:
    """Every rank receives the states of all and merges them."""
    out = state.out
    buffer = StateBuffer.allocate(1, tuple(out.shape), out.dtype, out.device)
    _copy(AttentionState(state.out[None], state.lse[None]), buffer.states())
    return merge(buffer.gather(ranks.group, ranks.num_ranks).states(), dim=0)


def _merge_rows(state: AttentionState, ranks: RankGroup) -> AttentionState:
    """Each rank merges an equal share of the rows and gives the result to all."""
    out, lse = state.out.flatten(0, -2), state.lse.flatten()
    num_rows, head_dim = out.shape
    share = -(-num_rows // ranks.num_ranks)
    buffer = StateBuffer.allocate(ranks.num_ranks, (share, head_dim), out.dtype, out.device)
    for rank, (part_out, part_lse) in enumerate(zip(*buffer.states(), strict=True)):
        rows = slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))
        part_out[: rows.stop - rows.start] = out[rows]
        part_lse[: rows.stop - rows.start] = lse[rows]
    merged = buffer.like(1)
    mine = AttentionState(*(x[0] for x in merged.states()))
    merge(buffer.exchange(ranks.group).states(), dim=0, out=mine)
    everyone = merged.gather(ranks.group, ranks.num_ranks).states()
    return AttentionState(
        everyone.out.reshape(-1, head_dim)[:num_rows].view(state.out.shape),
        everyone.lse.reshape(-1)[:num_rows].view(state.lse.shape),
    )


def _copy(source: AttentionState, target: AttentionState) -> None:
    target.out.copy_(source.out)
    target.lse.copy_(source.lse)
