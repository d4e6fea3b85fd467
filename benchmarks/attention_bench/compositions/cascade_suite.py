"""`anabranch bench cascade`: shared prefixes beside flat decode and FlashInfer's cascade."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from anabranch import PagedKV, attend_cascade, make_cascade
from attention_bench.compositions.page_rows import (
    PAGE,
    as_result,
    attended,
    dtype_on,
    exact_rows,
    normal,
    random_pages,
    rotations_of,
    shuffled,
)
from attention_bench.exact import CallResult, Expected
from attention_bench.implementations import Implementation, Prepared, require
from attention_bench.peers.site import import_peer

WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class CascadeCase:
    """One query for each sequence, which shares leading keys with its neighbours."""

    num_seqs: int
    spans: tuple[tuple[int, int], ...]  # shared keys, and by how many neighbours, from the front
    own: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    groups: tuple[str, ...] = ("table",)
    models: tuple[str, ...] = ()
    bench: str = "cascade"
    shared: int = 0  # keys of all spans: what plots count

    def __post_init__(self) -> None:
        object.__setattr__(self, "shared", sum(length for length, _ in self.spans))

    @property
    def name(self) -> str:
        """What tables and filters call it."""
        spans = " + ".join(f"{length}x{group}" for length, group in self.spans) or "none shared"
        heads = f"H{self.num_heads}/{self.num_kv_heads} D{self.head_dim}"
        return f"B{self.num_seqs} {spans} + {self.own} {heads}"

    @property
    def work(self) -> int:
        """Bytes of keys and values of 16 bits, each counted once however many share it."""
        keys = sum(length * self.num_seqs // group for length, group in self.spans)
        row = 2 * 2 * self.num_kv_heads * self.head_dim
        return (keys + self.num_seqs * self.own) * row

    @property
    def working_set(self) -> int:
        """Bytes that one rotation reads."""
        return self.work

    def table(self, device: torch.device) -> torch.Tensor:
        """int32 [num_seqs, pages of a sequence]."""
        seqs, parts, first = torch.arange(self.num_seqs, device=device), list[torch.Tensor](), 0
        for length, group in (*self.spans, (self.own, 1)):
            width = length // PAGE
            numbers = torch.arange(width, device=device) + first
            parts.append(numbers + (seqs // group)[:, None] * width)
            first += -(-self.num_seqs // group) * width
        return torch.cat(parts, 1).int()

    def prepare(self, device: torch.device) -> tuple[SharedInputs, Expected]:
        """Other keys in each rotation, under one table."""
        generator = torch.Generator(device).manual_seed(0)
        rotations, length = rotations_of(self, device), self.shared + self.own
        heads = (self.num_kv_heads, self.head_dim)
        table = shuffled(self.table(device), generator)
        queries = [
            normal((self.num_seqs, self.num_heads, self.head_dim), generator) for _ in rotations
        ]
        keys = [random_pages(table, heads, length, generator) for _ in rotations]
        return SharedInputs(self, queries, keys), exact_rows(queries[0][:, None], keys[0])


class SharedInputs(NamedTuple):
    """Queries and pages, one for each rotation."""

    case: CascadeCase
    queries: list[torch.Tensor]  # [num_seqs, num_heads, head_dim]
    keys: list[PagedKV]


def _cascade(levels: int | None, inputs: SharedInputs, **least: int) -> Prepared:
    """With as many levels as the case has, or as given."""
    wanted = max(len(inputs.case.spans), 1)
    require(levels != wanted, "these are the levels of the case")
    plan = partial(
        make_cascade, inputs.queries[0], inputs.keys[0], levels=levels or wanted, **least
    )
    made = plan()
    pairs = zip(inputs.queries, inputs.keys, strict=True)
    return Prepared([partial(attend_cascade, *pair, made) for pair in pairs], as_result, plan)


def _always(inputs: SharedInputs) -> Prepared:
    """Sharing whatever is shared, to see from where on that pays."""
    require(bool(inputs.case.spans), "nothing is shared")
    return _cascade(None, inputs, min_saved_keys=1, min_saved_bytes=0)


def _flat(inputs: SharedInputs) -> Prepared:
    return attended(inputs.queries, inputs.keys)


@cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _flashinfer(inputs: SharedInputs) -> Prepared:
    """Its multi-level wrapper, told which pages are shared. It compiles itself on first use."""
    case, keys = inputs.case, inputs.keys[0]
    require(case.head_dim == 128, "compiled for head dim 128 only")
    require(bool(case.spans), "nothing is shared")
    library: Any = import_peer("flashinfer")
    levels = (*case.spans, (case.own, 1))
    arrays: list[list[torch.Tensor]] = [[], [], [], []]
    place = 0
    for length, group in levels:
        width, count = length // PAGE, case.num_seqs // group
        ints = partial(torch.arange, dtype=torch.int32, device=keys.device)
        pages = keys.page_table[::group, place : place + width].flatten()
        lasts = torch.full((count,), PAGE, dtype=torch.int32, device=keys.device)
        for array, made in zip(
            arrays, (ints(count + 1) * group, ints(count + 1) * width, pages, lasts), strict=True
        ):
            array.append(made.contiguous())
        place += width
    wrapper = library.MultiLevelCascadeAttentionWrapper(len(levels), _workspace())
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, PAGE)
    plan = partial(wrapper.plan, *arrays, *shape, q_data_type=dtype_on(keys.device))
    plan()
    pairs = zip(inputs.queries, inputs.keys, strict=True)
    return Prepared([partial(wrapper.run, q, (x.k, x.v)) for q, x in pairs], CallResult, plan)


def implementations(device: str) -> list[Implementation]:
    """Ours, with unused levels too and without a limit, what it replaces, and FlashInfer."""
    found = [
        Implementation("anabranch", "ours", partial(_cascade, None)),
        Implementation("anabranch, 3 levels", "ours", partial(_cascade, 3)),
        Implementation("anabranch, always shared", "ours", _always),
        Implementation("flat decode", "context", _flat),
    ]
    peers = [Implementation("FlashInfer cascade", "peer", _flashinfer)]
    return found + (peers if device == "cuda" else [])


def cases_of(device: str) -> list[CascadeCase]:
    """One level, three levels, nothing and little shared; ever longer prefixes, larger groups."""
    if device == "cpu":
        small: Any = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "groups": ("cpu",)}
        spans = ((), ((64, 4),), ((32, 4), (32, 2)))
        return [CascadeCase(4, each, 32, **small) for each in spans]
    table = [
        CascadeCase(64, ((8192, 64),), 256, groups=("table", "shared", "batch")),
        CascadeCase(64, ((4096, 64), (2048, 16), (2048, 4)), 256),
        CascadeCase(64, (), 2048),
        CascadeCase(8, ((1024, 8),), 256),
    ]
    lengths = (256, 512, 1024, 2048, 4096)
    shared = [CascadeCase(64, ((length, 64),), 256, groups=("shared",)) for length in lengths]
    sizes = (2, 4, 8, 16, 32)
    return [
        *table,
        *shared,
        *(CascadeCase(size, ((8192, size),), 256, groups=("batch",)) for size in sizes),
    ]
