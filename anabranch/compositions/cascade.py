"""Shared prefixes: pages that sequences have in common are attended to once for all of them.

The keys of a sequence are cut into spans: one for each level at which it shares leading pages with
its neighbours in the batch, and the rest. A span is a part like any other, so states over spans are
merged. Who shares what is found on the device, when the cascade is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from anabranch.attend import attend
from anabranch.call import check_queries, pack_queries
from anabranch.check_states import check_destination
from anabranch.implementations import load_implementation
from anabranch.keys import PagedKV
from anabranch.keys.formats import bytes_per_head
from anabranch.plan import Plan, make_plan
from anabranch.state import AttentionState

MAX_LEVELS = 7  # with the rest, as many states as one merge takes
# A group must save the reading of so many keys to be attended to together. An estimate: beginning
# and merging one more block of 64 rows takes about as long as reading 512 keys.
MIN_SAVED_KEYS = 512
# A batch must save the reading of so many bytes to share anything: spans are a launch of their own.
# A trial run on an H200, graph replays, flat decode against one level: 126 MB saved 30.9 and 37.0
# us, 130 MB 30.6 and 37.9, 132 MB 39.6 and 40.9, 235 MB 50.3 and 45.6, 264 MB 58.3 and 44.2.
MIN_SAVED_BYTES = 192 << 20


class SharedPages(NamedTuple):
    """Spans of pages, and whose they are.

    Spans of a level stand in the order of the batch, with one for the tokens of no sequence: span
    `level * (num_seqs + 1) + i` is that of the group whose first sequence is i, or has no tokens.
    Tokens of level l are counted from `l * num_tokens`.
    """

    cu_seqlens: torch.Tensor  # int32 [levels * (num_seqs + 1) + 1], tokens of each span
    page_table: torch.Tensor  # int32 [levels * (num_seqs + 1), max_pages]
    seq_lens: torch.Tensor  # int32 [levels * (num_seqs + 1)], 0 where nothing is shared
    rest_table: torch.Tensor  # int32 [num_seqs, max_pages]
    rest_lens: torch.Tensor  # int32 [num_seqs]


@dataclass(frozen=True, slots=True)
class Cascade:
    """How the sequences of a step share pages, with a plan for each part of the work."""

    pages: SharedPages
    levels: int
    cu_seqlens_q: torch.Tensor | None
    shared_plan: Plan
    rest_plan: Plan
    prefix: AttentionState  # [levels * num_tokens, ...], over spans; empty states where none are
    order: torch.Tensor | None  # int64 [num_seqs], of sequences in the spans; None for the batch's


def make_cascade(
    q: torch.Tensor,
    keys: PagedKV,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    levels: int = 2,
    min_saved_keys: int = MIN_SAVED_KEYS,
    min_saved_bytes: int = MIN_SAVED_BYTES,
    reorder: bool = False,
    impl: str | None = None,
) -> Cascade:
    """Find what neighbours in the batch share, once for all layers of a step.

    q, cu_seqlens_q  as in attend(), packed; only shapes and lengths matter
    keys             pages whose table lists shared pages for every sequence that uses them.
                     Sequences that share must stand side by side in the batch, or be put there
    levels           how often a prefix may branch: with 2, a prompt of all sequences and below it
                     documents of some of them. What is shared beyond that is read by each
    min_saved_keys   a span is shared if that spares so many reads of a key,
    min_saved_bytes  and any span only if sharing all that the batch has in common would spare so
                     many bytes a layer
    reorder          bring sequences that share side by side, for one token a sequence; copies the
                     queries and the result of every layer

    Only whole pages before a sequence's queries are shared. Lengths and the table are read on the
    device: made inside a captured graph, a cascade is made anew at each replay.
    """
    if not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"levels must be 1 to {MAX_LEVELS}, got {levels}")
    if min_saved_keys < 1:
        raise ValueError(f"min_saved_keys must be at least 1, got {min_saved_keys}")
    if min_saved_bytes < 0:
        raise ValueError(f"min_saved_bytes must be 0 or more, got {min_saved_bytes}")
    if q.dim() != 3:
        raise ValueError(f"q must be packed [num_tokens, num_heads, dim], got {tuple(q.shape)}")
    queries = pack_queries(q, keys, cu_seqlens_q)
    check_queries(q, keys)
    order = None
    if reorder:
        if cu_seqlens_q is not None or tree_mask is not None:
            raise ValueError("reorder is for one token a sequence, got cu_seqlens_q or tree_mask")
        order = prefix_order(keys.page_table, (keys.seq_lens - 1).clamp(min=0) // keys.page_size)
        table, lens = (x.index_select(0, order) for x in (keys.page_table, keys.seq_lens))
        keys = replace(keys, page_table=table, seq_lens=lens)
    pages = SharedPages(
        *load_implementation("share_pages", impl, q.device).share_pages(
            keys.page_table,
            keys.seq_lens,
            queries.starts(),
            num_tokens=q.shape[0],
            page_size=keys.page_size,
            levels=levels,
            min_saved_keys=min_saved_keys,
            min_total_keys=-(-min_saved_bytes // _token_bytes(keys)),
        )
    )
    shared, rest = _sources(keys, pages)
    shared_plan = make_plan(
        q.new_empty(levels * q.shape[0], *q.shape[1:]),
        shared,
        cu_seqlens_q=pages.cu_seqlens,
        causal=False,
        rows_per_seq=q.shape[0] * q.shape[1] / keys.num_kv_heads,  # as if all shared one prefix
        leave_empty=True,
        impl=impl or _span_producer(keys),
    )
    rest_plan = make_plan(q, rest, cu_seqlens_q=queries.cu_seqlens, tree_mask=tree_mask, impl=impl)
    shape = (levels * q.shape[0], q.shape[1], keys.head_dim_v)
    with torch.inference_mode(False):  # written by layers, which may run outside of that mode
        prefix = AttentionState(
            torch.zeros(shape, dtype=q.dtype, device=q.device),
            torch.full(shape[:2], float("-inf"), device=q.device),
        )
    return Cascade(pages, levels, queries.cu_seqlens, shared_plan, rest_plan, prefix, order)


def attend_cascade(
    q: torch.Tensor,
    keys: PagedKV,
    cascade: Cascade,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out: AttentionState | None = None,
) -> AttentionState:
    """What attend(q, keys, ...) returns, with shared pages read once for each group.

    `cascade` is of this step, for the table and the lengths of `keys`. There is no window.
    """
    if cascade.order is not None:
        return _attend_reordered(q, keys, cascade, softcap, scale, sinks, out)
    shared, rest = _sources(keys, cascade.pages)
    levels, num_tokens = cascade.levels, q.shape[0]
    prefix = cascade.prefix
    attend(
        q.contiguous() if levels == 1 else q.repeat(levels, 1, 1),
        shared,
        cu_seqlens_q=cascade.pages.cu_seqlens,
        causal=False,
        softcap=softcap,
        scale=scale,
        plan=cascade.shared_plan,
        out=prefix,
    )
    return attend(
        q,
        rest,
        cu_seqlens_q=cascade.cu_seqlens_q,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        tree_mask=tree_mask,
        plan=cascade.rest_plan,
        prior=AttentionState(*(x.view(levels, num_tokens, *x.shape[1:]) for x in prefix)),
        out=out,
    )


def _attend_reordered(
    q: torch.Tensor,
    keys: PagedKV,
    cascade: Cascade,
    softcap: float | None,
    scale: float | None,
    sinks: torch.Tensor | None,
    out: AttentionState | None,
) -> AttentionState:
    """Queries in the order of the cascade, and their states back in the order of the batch."""
    order = cascade.order
    assert order is not None
    moved = q.index_select(0, order)
    in_order = replace(cascade, order=None)
    state = attend_cascade(moved, keys, in_order, softcap=softcap, scale=scale, sinks=sinks)
    restored = AttentionState(*(torch.empty_like(x).index_copy_(0, order, x) for x in state))
    if out is None:
        return restored
    check_destination(out, tuple(restored.out.shape), (q.dtype,), q.device)
    out.out.copy_(restored.out)
    out.lse.copy_(restored.lse)
    return out


def _sources(keys: PagedKV, pages: SharedPages) -> tuple[PagedKV, PagedKV]:
    return (
        replace(keys, page_table=pages.page_table, seq_lens=pages.seq_lens),
        replace(keys, page_table=pages.rest_table, seq_lens=pages.rest_lens),
    )


def _token_bytes(keys: PagedKV) -> int:
    """That are read of one token, with its scales."""
    heads = (bytes_per_head(x.format.name, x.ptr.shape[-1], keys.dtype) for x in keys.stores())
    return max(keys.num_kv_heads * sum(heads), 1)


def _span_producer(keys: PagedKV) -> str | None:
    """Spans without keys are common, and cost Triton's kernel less than Hopper's.

    A trial run on an H200, graph replays, all of a cascade of 64 sequences: 131 us against 154 us
    where nothing is shared, 71 us against 66 us where 8192 keys are. The host does not know which
    it will be. Latent rows and codes are left to the default.
    """
    return "triton" if keys.device.type == "cuda" and keys.view().is_plain else None


def prefix_order(page_table: torch.Tensor, num_pages: torch.Tensor) -> torch.Tensor:
    """The order int64 [num_seqs] of the prefix tree: who shares most stands closest.

    page_table  int32 [num_seqs, max_pages]
    num_pages   [num_seqs]: pages of each sequence that may be shared

    Branches of the tree stand in the order of their first sequence, so a batch that is in order
    stays as it is. Memory grows with num_seqs^2 * (num_seqs + max_pages).
    """
    num_seqs, max_pages = page_table.shape
    seqs = torch.arange(num_seqs, device=page_table.device)
    if not num_seqs:
        return seqs
    places = torch.arange(max_pages, device=page_table.device)
    shared = page_table[:, None] == page_table[None]
    shared &= places < torch.minimum(num_pages[:, None], num_pages[None])[..., None]
    common = shared.cumprod(-1, dtype=torch.int32).sum(-1)
    common.fill_diagonal_(max_pages + 1)
    # Where i and j part, each goes on in a branch; `first` is the first sequence in that of i.
    closer = common[:, None] > common[:, :, None]  # [i, j, k]: k parts from i after j does
    first = torch.where(closer, seqs, num_seqs).amin(-1)
    places = (first > first.T).sum(-1)
    return torch.empty_like(seqs).scatter_(0, places, seqs)
