"""Random calls of attend(), drawn in two steps: what kernels are compiled for, then the rest.

A kind fixes everything that would compile another kernel (heads, dims, where keys lie, which rules
there are), so that many calls of a kind cost one or two compilations. A seed alone gives a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from cases import SOURCES, Case

from anabranch.kernels.hopper_config import HEAD_DIMS

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
IMPLS = ("gluon", "latent", "triton", "torch")  # "latent" is the producer "gluon" over latent rows
TILED = ("gluon", "triton")  # whose tiles a kind may fix
KINDS_OF_A_SEED, CALLS_OF_A_KIND = 1000, 10000
EDGES = (0, 1, 2, 7, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 300)
MOST_SCORES = {"cuda": 1 << 24, "cpu": 1 << 16}  # of all heads, in float64
# A window of 1, and multiples of 16, are kernels of their own.
WINDOWS = (None, None, None, (3, 57, 201, 999), (16, 128, 512), (1,))
SOFTCAPS = (2.0, 20.0, 50.0)
DESTINATIONS = ("new", "new", "given", "given, not aligned")


@dataclass(frozen=True)
class Kind:
    """What the calls of a kind share."""

    seed: int
    case: Case  # without lengths
    windows: tuple[int | None, ...]
    softcap: bool
    tree: bool
    batch_invariant: bool
    tiles: str  # "wide" or "narrow" ones, or those "chosen" for the call
    rows: float  # query rows a sequence that Triton's tiles are selected for
    many_rows: bool  # also prompts that fill the GPU, so that no block is cut

    @property
    def name(self) -> str:
        case = self.case
        where = f"{case.source} {case.page_size}" if case.source[0] in "pl" else case.source
        rules = [
            *([] if case.causal else ["not causal"]),
            *(["window"] if self.windows != (None,) else []),
            *(["softcap"] if self.softcap else []),
            *(["sinks"] if case.sinks else []),
            *(["tree"] if self.tree else []),
            *(["invariant"] if self.batch_invariant else []),
            *(["many rows"] if self.many_rows else []),
        ]
        dims = "/".join(map(str, dict.fromkeys(case.dims)))
        heads = f"{case.num_kv_heads * case.group}/{case.num_kv_heads}"
        dtype = str(case.dtype).removeprefix("torch.")
        tiles = [] if self.tiles == "chosen" else [f"{self.tiles} tiles"]
        return ", ".join([f"{heads} x {dims} {dtype}", where, *tiles, *rules])


@dataclass(frozen=True)
class FuzzedCall:
    """One call: its inputs, how it is made, and the lengths of later replays of its graph."""

    seed: int
    kind: Kind
    case: Case
    planned: bool
    destination: str
    replays: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # q_lens and k_lens


def kind_of(seed: int) -> int:
    """The seed of the kind of a call."""
    return seed // CALLS_OF_A_KIND


def draw_kind(impl: str, seed: int, device: str) -> Kind:
    """The kind with this seed; neighbouring ones meet every value of a property equally often."""
    base, index = divmod(seed, KINDS_OF_A_SEED)

    def pick(name: str, values: Sequence[Any]) -> Any:
        shuffled = Random(f"{base} {name} {index // len(values)}").sample(values, len(values))
        return shuffled[index % len(values)]

    latent, hopper = impl == "latent", impl in ("gluon", "latent")
    causal = pick("causal", (True, True, True, False))
    windows = pick("windows", WINDOWS) or (None,)
    tree = causal and windows == (None,) and pick("tree", (False, True))
    many_rows = impl == "gluon" and device == "cuda" and pick("many rows", (False,) * 3 + (True,))
    group = pick("group", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
    dims = pick("dims", HEAD_DIMS if hopper else (*HEAD_DIMS, (40, 40), (72, 72)))
    case = Case(
        source="latent" if latent else pick("source", ("paged", *SOURCES)),
        page_size=pick("page size", (16, 32, 64, 128, 256) if hopper else (1, 8, 16, 64, 256)),
        num_kv_heads=1 if latent else pick("kv heads", (1, 2, 3)),
        group=pick("heads", (1, 7, 16, 20, 32, 48, 64, 96, 128)) if latent else group,
        dims=(576, 512) if latent else dims,
        dtype=pick("dtype", (HALF, BRAIN) if hopper else dtypes(device)),
        causal=causal,
        sinks=not latent and pick("sinks", (False, False, True)),
        device=device,
    )
    if many_rows:
        case = replace(case, num_kv_heads=-(-32 // group))
    return Kind(
        seed,
        case,
        windows,
        softcap=pick("softcap", (False, False, True)),
        tree=tree,
        batch_invariant=impl != "torch"
        and not many_rows
        and pick("invariant", (False, False, True)),
        tiles=pick("tiles", ("wide", "narrow", "chosen")) if impl in TILED else "chosen",
        rows=pick("rows", (4.0, 8.0, 32.0, 64.0, 1024.0)),
        many_rows=many_rows,
    )


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """The interpreter multiplies bfloat16 as integers."""
    return (HALF, BRAIN, SINGLE) if device == "cuda" else (HALF, SINGLE)


def draw_call(kind: Kind, seed: int) -> FuzzedCall:
    """The call with this seed."""
    draw, graphs = Random(seed), kind.case.device == "cuda"
    q_lens, k_lens = draw_lengths(kind, draw)
    case = replace(
        kind.case,
        q_lens=q_lens,
        k_lens=k_lens,
        window=draw.choice(kind.windows),
        softcap=draw.choice(SOFTCAPS) if kind.softcap else None,
        tree_width=draw.choice((1, 3, 17, 64, 80)) if kind.tree else None,
        padding=draw.choice((0, 0, 1, 7, 200)),
        scale=draw.choice((None, None, 0.2)),
    )
    replays = 2 if graphs and draw.random() < 0.25 else 0
    return FuzzedCall(
        seed,
        kind,
        case,
        planned=kind.tiles != "chosen" or kind.batch_invariant or draw.random() < 0.5,
        destination=draw.choice(DESTINATIONS),
        replays=tuple(other_lengths(case, draw) for _ in range(replays)),
    )


def draw_lengths(kind: Kind, draw: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key lengths: a mix, decodes, drafts to verify, prompts, or a long context."""
    num_seqs = draw.randint(1, 6)
    way = draw.choice(("mix", "mix", "mix", "decode", "verify", "prompt", "long"))
    longest = 16 if kind.case.source == "latent" else 300  # queries

    def length(most: int) -> int:
        return draw.choice((min(draw.choice(EDGES), most), draw.randint(0, most)))

    if kind.many_rows and draw.random() < 0.4:
        q_len = draw.randint(800, 1000)
        return (q_len,), (q_len + draw.choice((0, 0, 77)),)
    if way == "long":
        num_seqs = min(num_seqs, 2)
        k_lens = tuple(draw.randint(4000, 20000) for _ in range(num_seqs))
    else:
        k_lens = tuple(length(3000) for _ in range(num_seqs))
    if way in ("decode", "verify"):
        q_lens = (1 if way == "decode" else draw.randint(2, 9),) * num_seqs
    elif way == "prompt":
        q_lens = tuple(min(k_len, longest) for k_len in k_lens)
    else:
        q_lens = tuple(length(min(longest, 40 if way == "long" else 300)) for _ in range(num_seqs))
    return shorten(kind.case, q_lens, k_lens)


def shorten(
    case: Case, q_lens: tuple[int, ...], k_lens: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Halve the longest sequence until the reference has few enough scores to compute."""
    most = MOST_SCORES[case.device] // (case.num_kv_heads * case.group)
    lens = [*zip(q_lens, k_lens, strict=True)]
    while sum(q_len * k_len for q_len, k_len in lens) > most:
        largest = max(range(len(lens)), key=lambda seq: lens[seq][0] * lens[seq][1])
        q_len, k_len = lens[largest]
        lens[largest] = (q_len // 2, k_len) if q_len > k_len // 8 else (q_len, k_len // 2)
    return tuple(q_len for q_len, _ in lens), tuple(k_len for _, k_len in lens)


def other_lengths(case: Case, draw: Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths for which the same tensors hold all queries and keys."""
    room, q_lens = sum(case.q_lens), list[int]()
    for _ in case.q_lens:
        q_lens.append(draw.randint(0, room))
        room -= q_lens[-1]
    draw.shuffle(q_lens)
    k_lens = tuple(draw.choice((0, 1, k_len, k_len // 2)) for k_len in case.k_lens)
    k_lens = tuple(min(k_len, most) for k_len, most in zip(k_lens, case.k_lens, strict=True))
    return shorten(case, tuple(q_lens), k_lens)
