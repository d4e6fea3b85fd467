"""Random keys in pages, and exact attention over sequences of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from anabranch import AttentionState, PagedKV, attend, make_plan
from anabranch.keys import KeySource
from attention_bench.exact import CallResult, Expected, exact_attention
from attention_bench.implementations import Prepared
from attention_bench.inputs import num_rotations

PAGE = 16
GPU_DTYPE, CPU_DTYPE = torch.bfloat16, torch.float32
MOST_ROTATIONS = {"cuda": 32, "cpu": 2}  # each has keys of its own, of which lists read a part


def dtype_on(device: torch.device) -> torch.dtype:
    """16 bits where GPUs are compared, float32 where it is only seen that all works."""
    return GPU_DTYPE if device.type == "cuda" else CPU_DTYPE


def rotations_of(case: Any, device: torch.device) -> range:
    """Copies of the inputs, so that no call finds its keys in the cache."""
    return range(min(num_rotations(case, device), MOST_ROTATIONS[device.type]))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random numbers of the dtype of the device."""
    device = generator.device
    return torch.randn(shape, dtype=dtype_on(device), device=device, generator=generator)


def same_lens(num_seqs: int, length: int, device: torch.device) -> torch.Tensor:
    """int32 [num_seqs]."""
    return torch.full((num_seqs,), length, dtype=torch.int32, device=device)


def random_pages(
    table: torch.Tensor, heads: tuple[int, int], length: int, generator: torch.Generator
) -> PagedKV:
    """As many pages as a table names, of this many kv heads of this dim."""
    shape = (int(table.max()) + 1, PAGE, *heads)
    lens = same_lens(len(table), length, table.device)
    return PagedKV(normal(shape, generator), normal(shape, generator), table, lens)


def shuffled(table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The table with other page numbers, so that neighbours lie apart."""
    count = int(table.max()) + 1
    order = torch.randperm(count, generator=generator, device=table.device)
    return order[table.long()].int()


def exact_rows(
    q: torch.Tensor, keys: KeySource, masks: Iterable[torch.Tensor] | None = None
) -> Expected:
    """Attention of q [num_seqs, q_len, num_heads, dim] in float64; all keys unless masks say."""
    states: list[AttentionState] = []
    for seq, mask in enumerate(masks or [None] * len(q)):
        k, v = keys.gather(seq)
        every = torch.ones(q.shape[1], len(k), dtype=torch.bool, device=q.device)
        states.append(exact_attention(q[seq], k, v, every if mask is None else mask))
    state = AttentionState(*map(torch.cat, zip(*states, strict=True)))
    return Expected(torch.arange(len(state.lse), device=q.device), state)


def as_result(state: AttentionState) -> CallResult:
    return CallResult(state.out.flatten(0, -3), state.lse.flatten(0, -2))


def attended(
    queries: list[torch.Tensor],
    sources: Iterable[KeySource],
    expected: Expected | None = None,
    tree_mask: torch.Tensor | None = None,
) -> Prepared:
    """attend() of every rotation, on a GPU with one plan for all."""
    keys = list(sources)
    call, plan = partial(attend, tree_mask=tree_mask), None
    if queries[0].is_cuda:
        plan = partial(make_plan, queries[0], keys[0], tree_mask=tree_mask)
        call = partial(call, plan=plan())
    calls = [partial(call, q, source) for q, source in zip(queries, keys, strict=True)]
    return Prepared(calls, as_result, plan, expected=expected)
