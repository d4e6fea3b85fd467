"""plan_across(): what the queries of a step see of this rank's keys, shared by its layers.

A token sees a range of positions, of which this rank holds a range of keys. Without a window the
range begins at the first key, and a tree mask over the newest local keys says where it ends. With a
window every token becomes a sequence of its own, whose table lists its keys one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.call import check_queries, pack_queries
from anabranch.distributed.dealt_kv import DealtKV
from anabranch.keys import PagedKV
from anabranch.plan import Plan, make_plan
from anabranch.rules import check_rules, make_rules


@dataclass(frozen=True, slots=True)
class AcrossRule:
    """The choices that a plan and the calls it serves share."""

    num_tokens: int
    num_seqs: int
    page_size: int
    rank: int
    num_ranks: int
    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True)
class AcrossPlan:
    """Queries and local keys of a step as `attend` takes them, and its plan."""

    rule: AcrossRule
    page_table: torch.Tensor  # int32 [sequences or tokens, pages or keys]
    seq_lens: torch.Tensor  # int32, of local keys
    cu_seqlens_q: torch.Tensor  # int32
    tree_mask: torch.Tensor | None  # bool [num_tokens, width], over the newest local keys
    key_pages: bool  # the table lists keys, not pages
    plan: Plan | None  # None on a CPU

    def local_keys(self, keys: DealtKV) -> PagedKV:
        """This rank's keys of a layer."""
        k, v = (_key_pages(keys.k), _key_pages(keys.v)) if self.key_pages else (keys.k, keys.v)
        return PagedKV(k, v, self.page_table, self.seq_lens)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where the packed queries stand; tokens of no sequence are given to the last one."""

    cu_seqlens: torch.Tensor  # int32 [num_seqs + 1]
    max_q_len: int
    seqs: torch.Tensor  # int64 [num_tokens]
    q_lens: torch.Tensor  # int32 [num_tokens], of each token's sequence
    positions: torch.Tensor  # int32 [num_tokens]


def plan_across(
    q: torch.Tensor,
    keys: DealtKV,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    window: int | None = None,
    tree_mask: torch.Tensor | None = None,
) -> AcrossPlan:
    """Plan `attend_across(q, keys, ...)` with these options, on this rank, on the device.

    `max_q_len` bounds the query lengths of packed queries; without it the mask of a step has
    num_tokens x num_tokens bytes. Made inside a captured graph, the plan follows the lengths.
    """
    rules = make_rules(
        causal=causal, window=window, tree_mask=tree_mask, head_dim=q.shape[-1] if q.dim() else 1
    )
    whole = PagedKV(keys.k, keys.v, keys.page_table, keys.seq_lens)
    queries = pack_queries(q, whole, cu_seqlens_q)
    num_tokens = queries.packed.shape[0]
    check_rules(rules, check_queries(queries.packed, whole), q.device)
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"max_q_len must be at least 1, got {max_q_len}")
    longest = queries.q_len if cu_seqlens_q is None else min(max_q_len or num_tokens, num_tokens)
    rule = AcrossRule(
        num_tokens, keys.num_seqs, keys.page_size, keys.rank, keys.num_ranks, causal, window
    )
    tokens = _find_tokens(queries.starts(), num_tokens, longest, keys)
    starts, mask = tokens.cu_seqlens, None
    if window is not None:
        local, starts = _list_keys(tokens, keys, causal, window)
    else:
        local = PagedKV(keys.k, keys.v, keys.page_table, keys.local_lens())
        if tree_mask is not None or (causal and longest > 1):
            mask = _mask_newest(tokens, keys, tree_mask)
    plan = None
    if q.device.type != "cpu":  # the CPU's own path divides no work
        plan = make_plan(
            queries.packed, local, cu_seqlens_q=starts, causal=mask is not None, tree_mask=mask
        )
    by_key = window is not None
    return AcrossPlan(rule, local.page_table, local.seq_lens, starts, mask, by_key, plan)


def _find_tokens(starts: torch.Tensor, num_tokens: int, max_q_len: int, keys: DealtKV) -> _Tokens:
    rows = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    seqs = torch.searchsorted(starts[1:], rows, right=True).clamp_max(keys.num_seqs - 1)
    q_lens = starts.diff()[seqs]
    positions = keys.seq_lens[seqs] - q_lens + rows - starts[seqs]
    return _Tokens(starts, max_q_len, seqs, q_lens, positions)


def _mask_newest(
    tokens: _Tokens, keys: DealtKV, tree_mask: torch.Tensor | None
) -> torch.Tensor:  # bool [num_tokens, max_q_len]
    """Which of the newest q_len local keys a token sees; it sees all keys before those.

    No new token lies before them, since a rank holds at most all q_len of them.
    """
    columns = torch.arange(tokens.max_q_len, dtype=torch.int32, device=keys.k.device)
    first = keys.local_lens()[tokens.seqs] - tokens.q_lens
    local = first[:, None] + columns
    if tree_mask is None:
        return local < keys.keys_before(tokens.positions + 1)[:, None]
    oldest = (keys.seq_lens[tokens.seqs] - tokens.q_lens)[:, None]  # position of new token 0
    new = keys.positions_of(local) - oldest
    width = tree_mask.shape[1]
    shown = tree_mask.gather(1, new.clamp(0, width - 1).long()) if width else new < 0
    return (new < 0) | (shown & (new < width))


def _list_keys(
    tokens: _Tokens, keys: DealtKV, causal: bool, window: int
) -> tuple[PagedKV, torch.Tensor]:
    """A sequence for each token, of the local keys it sees; and where their queries begin."""
    num_tokens = tokens.positions.shape[0]
    seq_lens = keys.seq_lens[tokens.seqs]
    end = (tokens.positions + 1).minimum(seq_lens) if causal else seq_lens
    start = keys.keys_before(tokens.positions - window + 1)
    stop = keys.keys_before(end).clamp_max(keys.page_table.shape[1] * keys.page_size)
    width = keys.most_keys(window if causal else window + tokens.max_q_len - 1)
    columns = torch.arange(width, dtype=torch.int32, device=keys.k.device)
    listed = start[:, None] + columns
    listed = listed.minimum((stop - 1).clamp_min(0)[:, None])  # inside the table
    table = keys.page_table[tokens.seqs].gather(1, (listed // keys.page_size).long())
    slots = table * _key_pages_in_page(keys) + listed % keys.page_size
    lens = (stop - start).clamp_min(0)
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=keys.k.device)
    starts = starts.minimum(tokens.cu_seqlens[-1])  # tokens of no sequence stay so
    return PagedKV(_key_pages(keys.k), _key_pages(keys.v), slots, lens), starts


def _key_pages_in_page(keys: DealtKV) -> int:
    """How many pages of one key a page is apart from the next."""
    steps = [divmod(x.stride(0), x.stride(1)) for x in (keys.k, keys.v)]
    if steps[0] != steps[1] or steps[0][1]:
        raise ValueError(
            "a window over dealt pages needs the pages of k and v apart by the same multiple of "
            f"their keys, got strides {keys.k.stride()} and {keys.v.stride()}"
        )
    return steps[0][0]


def _key_pages(cache: torch.Tensor) -> torch.Tensor:
    """A paged cache as pages of one key each; where heads come before keys these overlap."""
    num_pages, page_size, *row = cache.shape
    page, key, *strides = cache.stride()
    count = (num_pages - 1) * (page // key) + page_size if num_pages else 0
    return cache.as_strided((count, 1, *row), (key, key, *strides))
