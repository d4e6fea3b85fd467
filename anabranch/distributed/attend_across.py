"""attend_across(): attention over a cache whose pages are dealt out over ranks."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from anabranch.attend import attend
from anabranch.distributed.dealt_kv import DealtKV
from anabranch.distributed.merge_across import HeadLayout, merge_across
from anabranch.distributed.plan_across import AcrossPlan, plan_across
from anabranch.distributed.rank_group import check_agreement, find_group
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype
from anabranch.state import AttentionState


def attend_across(
    q: torch.Tensor,
    keys: DealtKV,
    group: dist.ProcessGroup | None = None,
    *,
    heads: HeadLayout = "all",
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    plan: AcrossPlan | None = None,
    check: bool = False,
    impl: str | None = None,
) -> AttentionState:
    """Attend from `q` to the keys of all ranks of `group`: decode, verify, prefill or a mix.

    q           the same on every rank, as `attend` takes it, with all heads of `keys`
    keys        this rank's pages, with the lengths of the whole sequences
    heads       the layout of the result, as in `merge_across`
    max_q_len   a bound for the query lengths of packed queries; num_tokens by default
    plan        from plan_across() with the same options, to be shared by the layers of a step
    check       also validate lengths and page indices, and compare shapes and lengths between
                ranks, which waits for the device and for all ranks

    The other options are those of `attend`, and the state is the one that `attend` gives over all
    keys: causal rule and window count positions in the whole sequence.
    """
    ranks = find_group(group)
    if (keys.rank, keys.num_ranks) != (ranks.rank, ranks.num_ranks):
        raise ValueError(
            f"keys are those of rank {keys.rank} of {keys.num_ranks}, "
            f"this process is rank {ranks.rank} of {ranks.num_ranks}"
        )
    if check:
        lens = cast("list[int]", keys.seq_lens.tolist())  # pyright: ignore[reportUnknownMemberType]
        shapes = {"q": tuple(q.shape), "dtype": q.dtype, "page_size": keys.page_size}
        check_agreement(ranks, **shapes, seq_lens=lens)
    if plan is None:
        plan = plan_across(
            q, keys, cu_seqlens_q=cu_seqlens_q, max_q_len=max_q_len, causal=causal, window=window,
            tree_mask=tree_mask,
        )  # fmt: skip
    packed = q.flatten(0, 1) if q.dim() == 4 else q
    _check_plan(packed, keys, plan, causal, window)
    state = attend_locally(
        packed, keys, plan, softcap=softcap, scale=scale, sinks=sinks, check=check, impl=impl
    )
    merged = merge_across(state, group, heads=heads)
    if q.dim() == 3:
        return merged
    return AttentionState(*(x.unflatten(0, q.shape[:2]) for x in merged))


def attend_locally(
    q: torch.Tensor,  # packed
    keys: DealtKV,
    plan: AcrossPlan,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    check: bool = False,
    impl: str | None = None,
) -> AttentionState:
    """The state over the keys of this rank alone: what it contributes to the merge."""
    if sinks is not None:  # refused on every rank, though one rank has them
        sizes = Sizes()
        sizes.match("q", q, "num_tokens num_heads head_dim_k")
        sizes.match("sinks", sinks, "num_heads")
        check_dtype("sinks", sinks, FLOATS)
        check_device("sinks", sinks, q.device)
    return attend(
        q,
        plan.local_keys(keys),
        cu_seqlens_q=plan.cu_seqlens_q,
        causal=plan.tree_mask is not None,
        softcap=softcap,
        scale=scale,
        sinks=sinks if keys.rank == 0 else None,  # a sink is one key, so one rank has it
        tree_mask=plan.tree_mask,
        plan=plan.plan,
        check=check,
        impl=impl,
    )


def _check_plan(
    q: torch.Tensor, keys: DealtKV, plan: AcrossPlan, causal: bool, window: int | None
) -> None:
    rule = plan.rule
    for name, planned, given in (
        ("num_tokens", rule.num_tokens, q.shape[0]),
        ("num_seqs", rule.num_seqs, keys.num_seqs),
        ("page_size", rule.page_size, keys.page_size),
        ("rank", rule.rank, keys.rank),
        ("num_ranks", rule.num_ranks, keys.num_ranks),
        ("causal", rule.causal, causal),
        ("window", rule.window, window),
    ):
        if planned != given:
            raise ValueError(f"the plan was made for {name} = {planned}, got {given}")
