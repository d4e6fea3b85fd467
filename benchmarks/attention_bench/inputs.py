"""Tensors for a case, made on the device: several rotations, so that no call finds its keys in L2.

A rotation has its own queries, keys and values; lengths and the shuffled page table are shared.
A warm case has one rotation.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.keys import DenseKV, PagedKV, RaggedKV
from anabranch.state import AttentionState
from attention_bench.cases import DTYPES, AttendCase, Case, MergeCase

L2_MULTIPLE = 4  # the working set is at least this many times the L2 cache
CPU_CACHE = 32 << 20


class MergeInputs(NamedTuple):
    """Pairs of states to merge, one for each rotation; every row has keys on both sides."""

    case: MergeCase
    pairs: list[tuple[AttentionState, AttentionState]]


class AttendInputs(NamedTuple):
    """The same queries and keys in every layout, one of each for each rotation."""

    case: AttendCase
    queries: list[torch.Tensor]  # [num_tokens, num_heads, head_dim]
    dense: list[DenseKV]
    paged: list[PagedKV]
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def ragged(self) -> list[RaggedKV]:
        """The dense keys, packed: all sequences have the same length, so a view."""
        return [
            RaggedKV(keys.k.flatten(0, 1), keys.v.flatten(0, 1), self.cu_seqlens_k)
            for keys in self.dense
        ]


Inputs = MergeInputs | AttendInputs


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Inputs of a case, the same numbers at every call."""
    generator = torch.Generator(device).manual_seed(0)
    if isinstance(case, MergeCase):
        return _merge_inputs(case, generator)
    return _attend_inputs(case, generator)


def num_rotations(case: Case, device: torch.device) -> int:
    """How many copies exceed the last cache several times; the size of a CPU's is a guess."""
    cuda = device.type == "cuda"
    size = torch.cuda.get_device_properties(device).L2_cache_size if cuda else CPU_CACHE
    return -(-L2_MULTIPLE * size // case.working_set)


def _merge_inputs(case: MergeCase, generator: torch.Generator) -> MergeInputs:
    shape = (case.num_tokens, case.num_heads, case.head_dim)

    def state() -> AttentionState:
        out = _normal(shape, DTYPES[case.dtype], generator)
        return AttentionState(out, 5 + _normal(shape[:-1], torch.float32, generator))

    count = 1 if case.warm else num_rotations(case, generator.device)
    return MergeInputs(case, [(state(), state()) for _ in range(count)])


def _attend_inputs(case: AttendCase, generator: torch.Generator) -> AttendInputs:
    device, dtype = generator.device, DTYPES[case.dtype]
    count = num_rotations(case, device)
    seq_lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32, device=device)
    table = _shuffled_table(case, generator)
    queries = [
        _normal((case.num_tokens, case.num_heads, case.head_dim), dtype, generator)
        for _ in range(count)
    ]
    rows = (case.num_seqs, case.seq_len, case.num_kv_heads)
    dense = [
        DenseKV(
            _normal((*rows, case.head_dim), dtype, generator),
            _normal((*rows, case.head_dim_v), dtype, generator),
            seq_lens,
        )
        for _ in range(count)
    ]
    paged = [
        PagedKV(_scatter(x.k, case, table), _scatter(x.v, case, table), table, seq_lens)
        for x in dense
    ]
    starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)
    return AttendInputs(case, queries, dense, paged, starts * case.q_len, starts * case.seq_len)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def _shuffled_table(case: AttendCase, generator: torch.Generator) -> torch.Tensor:
    width = -(-case.seq_len // case.page_size)
    pages = torch.randperm(case.num_seqs * width, generator=generator, device=generator.device)
    return pages.view(case.num_seqs, width).int()


def _scatter(rows: torch.Tensor, case: AttendCase, table: torch.Tensor) -> torch.Tensor:
    """[num_seqs, seq_len, heads, dim] into the pages that the table names; page tails are 0."""
    _, seq_len, heads, dim = rows.shape
    padding = table.shape[1] * case.page_size - seq_len
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding))
    pages = torch.empty_like(rows.view(table.numel(), case.page_size, heads, dim))
    pages[table.flatten().long()] = rows.view(pages.shape)
    return pages
