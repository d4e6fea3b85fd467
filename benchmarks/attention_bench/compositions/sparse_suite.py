"""`anabranch bench sparse`: lists of keys beside torch's gather and beside dense decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from anabranch import AttentionState, DenseKV, LatentKV, PagedKV, SelectedKV
from anabranch.keys import KeySource
from attention_bench.compositions.page_rows import (
    PAGE,
    attended,
    exact_rows,
    normal,
    rotations_of,
    same_lens,
    shuffled,
)
from attention_bench.exact import CallResult, Expected
from attention_bench.implementations import Implementation, Prepared, UnavailableError, require


@dataclass(frozen=True, slots=True)
class SparseCase:
    """A list of `kept` keys for each query head, or, of latent rows, for all heads."""

    num_seqs: int
    seq_len: int
    kept: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    groups: tuple[str, ...] = ("table",)
    models: tuple[str, ...] = ()
    bench: str = "sparse"

    @property
    def is_latent(self) -> bool:
        """Whether values are columns of the keys, and all heads share a list."""
        return self.head_dim != self.head_dim_v

    @property
    def name(self) -> str:
        """What tables and filters call it."""
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.is_latent else "")
        heads = f"H{self.num_heads}/{self.num_kv_heads}"
        return f"B{self.num_seqs} L{self.seq_len} {heads} {dims} keep {self.kept}"

    @property
    def work(self) -> int:
        """Bytes of the listed keys and values, of 16 bits."""
        row = self.head_dim if self.is_latent else self.num_heads * 2 * self.head_dim
        return 2 * self.num_seqs * self.kept * row

    @property
    def working_set(self) -> int:
        """Bytes that one rotation reads."""
        return self.work

    def prepare(self, device: torch.device) -> tuple[ListInputs, Expected]:
        """Lists without repetition, other ones and other keys in each rotation."""
        generator = torch.Generator(device).manual_seed(0)
        made = [_rotation(self, generator) for _ in rotations_of(self, device)]
        inputs = ListInputs(self, *map(list, zip(*made, strict=True)))
        return inputs, _exact_lists(inputs.queries[0], inputs.paged[0], inputs.lists[0])


class ListInputs(NamedTuple):
    """The same keys in a padded batch, unless they are latent, and in pages; one for a rotation."""

    case: SparseCase
    queries: list[torch.Tensor]  # [num_seqs, num_heads, head_dim]
    dense: list[DenseKV | None]
    paged: list[PagedKV | LatentKV]
    lists: list[torch.Tensor]  # int32 [num_seqs, num_heads, kept] or [num_seqs, kept]

    def selected(self, sources: list[KeySource]) -> list[SelectedKV]:
        counts = torch.full_like(self.lists[0][..., 0], self.case.kept)
        try:
            return [SelectedKV(x, y, counts) for x, y in zip(sources, self.lists, strict=True)]
        except ValueError as refusal:
            raise UnavailableError(str(refusal)) from refusal


def _rotation(case: SparseCase, generator: torch.Generator) -> tuple[object, ...]:
    device, size = generator.device, (case.num_seqs, case.seq_len)
    q = normal((case.num_seqs, case.num_heads, case.head_dim), generator)
    num_lists = () if case.is_latent else (case.num_heads,)
    scores = torch.rand(case.num_seqs, *num_lists, case.seq_len, device=device, generator=generator)
    lists = scores.topk(case.kept, -1, sorted=False).indices.int()
    width = case.seq_len // PAGE
    numbers = torch.arange(case.num_seqs * width, device=device).view(case.num_seqs, width)
    table, lens = shuffled(numbers, generator), same_lens(*size, device)
    places = table.flatten().long().argsort()
    if case.is_latent:
        cache = normal((table.numel(), PAGE, case.head_dim), generator)
        return q, None, LatentKV(cache, table, lens, case.head_dim_v), lists
    dense = [normal((*size, case.num_kv_heads, case.head_dim), generator) for _ in range(2)]
    k, v = (x.view(-1, PAGE, *x.shape[2:])[places] for x in dense)
    return q, DenseKV(*dense), PagedKV(k, v, table, lens), lists


def _exact_lists(q: torch.Tensor, keys: KeySource, lists: torch.Tensor) -> Expected:
    """Attention of every head to its list, in float64."""
    num_seqs, num_heads, dim = q.shape
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seq in range(num_seqs):
        k, v = keys.gather(seq)
        heads = torch.arange(num_heads, device=q.device)[:, None] * k.shape[1] // num_heads
        listed = lists[seq].expand(num_heads, -1).long()
        scores = torch.einsum("hd,hkd->hk", q[seq].double(), k[listed, heads].double()) * dim**-0.5
        lse = scores.logsumexp(-1)
        weights = (scores - lse[:, None]).exp()
        states.append((torch.einsum("hk,hkd->hd", weights, v[listed, heads].double()), lse))
    state = AttentionState(*map(torch.stack, zip(*states, strict=True)))
    return Expected(torch.arange(num_seqs, device=q.device), state)


def _selected(in_pages: bool, inputs: ListInputs) -> Prepared:
    if in_pages:
        return attended(inputs.queries, inputs.selected([*inputs.paged]))
    require(not inputs.case.is_latent, "latent rows lie in pages")
    return attended(inputs.queries, inputs.selected([x for x in inputs.dense if x is not None]))


def _all_keys(inputs: ListInputs) -> Prepared:
    """Dense decode of every key."""
    expected = exact_rows(inputs.queries[0][:, None], inputs.paged[0])
    return attended(inputs.queries, inputs.paged, expected)


def _kept_keys(inputs: ListInputs) -> Prepared:
    """Dense decode of a cache that holds the listed rows only."""
    require(inputs.case.is_latent, "heads have other lists each")
    sources: list[KeySource] = []
    for keys, lists in zip(inputs.paged, inputs.lists, strict=True):
        rows = [keys.gather(seq)[0][lists[seq].long(), 0] for seq in range(len(lists))]
        cache = torch.stack(rows).view(-1, PAGE, inputs.case.head_dim)
        table = torch.arange(len(cache), dtype=torch.int32, device=cache.device)
        lens = same_lens(len(lists), inputs.case.kept, cache.device)
        table = table.view(len(lists), -1)
        sources.append(LatentKV(cache, table, lens, inputs.case.head_dim_v))
    return attended(inputs.queries, sources)


def _gather(inputs: ListInputs) -> Prepared:
    """Torch: copy the listed keys of every list, then scaled_dot_product_attention."""
    case = inputs.case

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor) -> object:
        seqs = torch.arange(case.num_seqs, device=q.device)
        if case.is_latent:
            keys, values = (x[seqs[:, None], lists].transpose(1, 2) for x in (k, v))
        else:
            heads = torch.arange(case.num_heads, device=q.device) * k.shape[2] // case.num_heads
            keys, values = (x[seqs[:, None, None], lists, heads[:, None]] for x in (k, v))
        return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=case.is_latent)

    def contiguous(i: int) -> tuple[torch.Tensor, ...]:
        dense, paged = inputs.dense[i], inputs.paged[i]
        if dense is not None:
            return dense.k, dense.v
        rows = torch.stack([paged.gather(seq)[0] for seq in range(case.num_seqs)])
        return rows, rows[..., : case.head_dim_v]

    calls = [
        partial(call, inputs.queries[i], *contiguous(i), lists.long())
        for i, lists in enumerate(inputs.lists)
    ]
    return Prepared(calls, lambda out: CallResult(out[:, :, 0]))


def implementations(_device: str) -> list[Implementation]:
    """Ours, what lists replace, and torch's way to do the same."""
    return [
        Implementation("anabranch", "ours", partial(_selected, False)),
        Implementation("anabranch paged", "ours", partial(_selected, True)),
        Implementation("dense decode", "context", _all_keys),
        Implementation("dense decode of kept keys", "context", _kept_keys),
        Implementation("torch gather + SDPA", "peer", _gather),
    ]


def cases_of(device: str) -> list[SparseCase]:
    """2% of the keys; ever more keys and ever longer lists; one list for all heads."""
    if device == "cpu":
        small = SparseCase(2, 256, 16, 4, 2, 16, 16, groups=("cpu",))
        latent = replace(small, num_kv_heads=1, head_dim=24)
        return [small, latent]
    table = [SparseCase(1, 32000, 640), SparseCase(16, 32000, 640)]
    table += [SparseCase(3, 16000, 320, 32, 32, 256, 256)]
    table += [SparseCase(8, 65536, 2048, 128, 1, 576, 512)]
    lengths = (8192, 16384, 65536, 131072)
    growing = [SparseCase(1, length, 640, groups=("context",)) for length in lengths]
    kept = [SparseCase(1, 32768, count, groups=("kept",)) for count in (160, 320, 1280, 2560)]
    both = SparseCase(1, 32768, 640, groups=("context", "kept"))
    return [*table, *growing, both, *kept]
