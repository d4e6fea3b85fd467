"""Entries of a step: states over the same tokens are merged, the others joined."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from tolerance import assert_close

from anabranch import reference
from anabranch.llm.runner.kv_cache import LayerCache
from anabranch.llm.runner.step import Entry, Step

PAGE, NUM_HEADS, NUM_KV_HEADS, DIM = 4, 4, 2, 8
RULES: dict[str, Any] = {"scale": DIM**-0.5, "window": None, "softcap": None, "sinks": None}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_cache(num_pages: int) -> LayerCache:
    shape = (num_pages, PAGE, NUM_KV_HEADS, DIM)
    return LayerCache(torch.randn(shape), torch.randn(shape))


def random_tokens(num_tokens: int) -> list[torch.Tensor]:
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [torch.randn(num_tokens, number, DIM) for number in heads]


def run(step: Step, tokens: list[torch.Tensor], cache: LayerCache, **rules: Any) -> torch.Tensor:
    return step.attend(*tokens, cache, **(RULES | rules))


def exact(entry: Entry, q: torch.Tensor, cache: LayerCache, **rules: Any) -> torch.Tensor:
    """What one entry gives, in float64, over keys that a step has kept."""
    keys = cache.keys(entry.page_table, entry.seq_lens)
    return reference.attend(q, keys, cu_seqlens_q=entry.cu_seqlens_q, **(RULES | rules)).out


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (3, 1, 2)], ids=["decode", "mixed"])
@torch.inference_mode()
def test_a_cascade_is_two_entries(q_lens: tuple[int, ...], sinks: torch.Tensor | None) -> None:
    """A prefix of two pages, shared by three sequences, and what each has of its own."""
    torch.manual_seed(0)
    num_tokens, own_lens = sum(q_lens), [q_len + 1 for q_len in q_lens]
    cache, tokens = random_cache(5), random_tokens(num_tokens)
    cu_seqlens, own = ints(0, *accumulate(q_lens)), ints(2, 3, 4)[:, None]
    places = [(2 + seq) * PAGE + 1 + i for seq, q_len in enumerate(q_lens) for i in range(q_len)]
    slots, every = torch.tensor(places), slice(0, num_tokens)
    table = torch.cat([ints(0, 1).expand(3, 2), own], 1).contiguous()
    whole = Entry(every, cu_seqlens, ints(*(2 * PAGE + size for size in own_lens)), table)
    prefix = Entry(every, ints(0, num_tokens), ints(2 * PAGE), ints(0, 1)[None], causal=False)
    suffix = Entry(every, cu_seqlens, ints(*own_lens), own)
    once = run(Step([whole], slots), tokens, cache, sinks=sinks)
    expected = exact(whole, tokens[0], cache, sinks=sinks)
    for entries in ([prefix, suffix], [suffix, prefix]):
        assert_close(run(Step(entries, slots), tokens, cache, sinks=sinks), expected, once)


@torch.inference_mode()
def test_a_branch_of_a_tree_sees_its_ancestors_only() -> None:
    torch.manual_seed(1)
    cache, tokens = random_cache(2), random_tokens(3)
    straight = LayerCache(cache.k.clone(), cache.v.clone())
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()  # 1 and 2 both follow 0
    length, table = 5, ints(0, 1)[None]
    tree = Entry(slice(0, 3), ints(0, 3), ints(length + 3), table, tree_mask=mask)
    branch = Entry(slice(0, 2), ints(0, 2), ints(length + 2), table)
    slots = torch.arange(length, length + 3)
    found = run(Step([tree], slots), tokens, cache)
    kept = [x[[0, 2]] for x in tokens]
    by_torch = run(Step([branch], slots[:2]), kept, straight)
    assert_close(found[[0, 2]], exact(branch, kept[0], straight), by_torch)


@torch.inference_mode()
def test_an_entry_of_earlier_keys_counts_no_window() -> None:
    prefix = Entry(slice(0, 1), ints(0, 1), ints(PAGE), ints(0)[None], causal=False)
    with pytest.raises(ValueError, match="window needs causal attention, got window=3"):
        run(Step([prefix], torch.tensor([-1])), random_tokens(1), random_cache(1), window=3)


def test_entries_cover_the_tokens_in_order() -> None:
    entries = [Entry(slice(*bounds), ints(0), ints(), ints()) for bounds in ((0, 2), (3, 4))]
    with pytest.raises(AssertionError, match="left out"):
        Step(entries, torch.arange(4))
