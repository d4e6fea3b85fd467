"""Calls of attention as engines make them, drawn at random: real models' heads, users' lengths.

Rules that choose tiles and parts are made from calls that somebody looked at. A seed that nobody
looked at shows how they do between those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import median
from typing import Any, NamedTuple

MOST_BYTES = 3e9  # of keys and values
MOST_FLOPS = 4e12
MOST_TOKENS = 32768


@dataclass(frozen=True)
class Model:
    """Heads of a model; `weight` is how often it is drawn."""

    name: str
    heads: tuple[int, int]
    dims: tuple[int, int] = (128, 128)
    window: int | None = None  # of some of its layers
    softcap: float | None = None
    weight: int = 2


MODELS = [
    Model("Llama 3 8B", (32, 8), weight=6),
    Model("Llama 3 70B", (64, 8), weight=4),
    Model("Llama 3.2 1B", (32, 8), (64, 64)),
    Model("Llama 3.2 3B", (24, 8)),
    Model("Qwen2.5 0.5B", (14, 2), (64, 64)),
    Model("Qwen2.5 7B", (28, 4), weight=4),
    Model("Qwen2.5 14B", (40, 8), weight=3),
    Model("Qwen3 30B-A3B", (32, 4), weight=3),
    Model("Mistral 7B", (32, 8), window=4096),
    Model("Gemma 2 9B", (16, 8), (256, 256), window=4096, softcap=50.0),
    Model("Gemma 3 4B", (8, 4), (256, 256), window=1024),
    Model("Gemma 3 27B", (32, 16), window=1024),
    Model("Phi 3 mini", (32, 32), (96, 96), window=2047, weight=1),
    Model("gpt-oss", (64, 8), (64, 64), window=128, weight=3),
    Model("GLM 4.5", (96, 8), weight=1),
    Model("SmolLM2", (9, 3), (64, 64), weight=1),
    Model("Llama 2 7B", (32, 32), weight=1),
    Model("Falcon 7B, widened", (32, 1), weight=1),
]
DEEPSEEK = [
    Model("DeepSeek V2 Lite prompts", (16, 16), (192, 128), weight=1),
    Model("DeepSeek V3 prompts", (128, 128), (192, 128), weight=1),
]
LATENT = [Model(f"latent, {heads} heads", (heads, 1), (576, 512)) for heads in (16, 32, 64, 128)]
KINDS = ("decode", "verify", "prefill", "chunk", "mixed", "latent")
PAGES = [16] * 6 + [32, 64, 128, 256]


@dataclass(frozen=True)
class DrawnCall:
    """One call: new tokens and keys of each sequence."""

    kind: str
    model: Model
    heads: tuple[int, int]
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    page_size: int = 16  # 0 for packed keys
    window: int | None = None
    causal: bool = True

    @property
    def name(self) -> str:
        """The kind, the model, and lengths as ranges."""
        heads, dims = ("/".join(map(str, pair)) for pair in (self.heads, self.model.dims))
        rule = f", window {self.window}" if self.window else "" if self.causal else ", not causal"
        page = f", pages of {self.page_size}" if self.page_size else ""
        q, k = span(self.q_lens), span(self.k_lens)
        return (
            f"{self.kind} {self.model.name} {heads} of {dims}: "
            f"{len(self.q_lens)} x {q} at {k}{page}{rule}"
        )

    @property
    def kv_bytes(self) -> int:
        width = 576 if self.kind == "latent" else sum(self.model.dims)
        return sum(self.k_lens) * self.heads[1] * width * 2

    @property
    def flops(self) -> float:
        pairs = sum(q * (k - q / 2) for q, k in zip(self.q_lens, self.k_lens, strict=True))
        return 2 * pairs * self.heads[0] * sum(self.model.dims)


def span(lengths: tuple[int, ...]) -> str:
    """One length, or the least and the largest."""
    least, most = min(lengths), max(lengths)
    return str(least) if least == most else f"{least} to {most}"


def log_uniform(rng: Random, low: int, high: int) -> int:
    return round(exp(rng.uniform(log(low), log(high))))


def lengths(rng: Random, count: int, low: int, high: int) -> list[int]:
    """Equal ones, as benchmarks have them, or lognormal ones, as users have."""
    middle = log_uniform(rng, low, high)
    if rng.random() < 0.4:
        return [middle] * count
    spread = rng.uniform(0.3, 1.2)
    drawn = (int(rng.lognormvariate(log(middle), spread)) for _ in range(count))
    return [min(max(length, low), high) for length in drawn]


def queries_and_keys(rng: Random, kind: str) -> tuple[list[int], list[int]]:
    """New tokens and keys of each sequence of a call."""
    batch = log_uniform(rng, 1, 256)
    if kind == "decode":
        return [1] * batch, lengths(rng, batch, 32, 65536)
    if kind in ("verify", "latent"):
        batch = min(batch, 128)
        q_len = rng.choice([1, 1, 1, 2, 3, 4] if kind == "latent" else [2, 3, 4, 5, 6, 8, 12, 16])
        most = 65536 if kind == "latent" else 32768
        return [q_len] * batch, [q_len + k for k in lengths(rng, batch, 64, most)]
    if kind == "prefill":
        q_lens = lengths(rng, min(batch, 32), 16, 16384)
        return q_lens, q_lens
    chunks = [log_uniform(rng, 32, 4096) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    k_lens = [q + log_uniform(rng, 16, 65536) for q in chunks]
    if kind == "chunk":
        return chunks, k_lens
    k_lens = [q if rng.random() < 0.3 else k for q, k in zip(chunks, k_lens, strict=True)]
    decodes = min(batch, 192)
    return chunks + [1] * decodes, k_lens + [1 + k for k in lengths(rng, decodes, 32, 32768)]


def draw_call(rng: Random, kind: str) -> DrawnCall:
    """A call of a kind that a GPU can hold and finish soon."""
    models = LATENT if kind == "latent" else MODELS + DEEPSEEK * (kind == "prefill")
    while True:
        (model,) = rng.choices(models, [each.weight for each in models])
        heads, window = model.heads, model.window if rng.random() < 0.5 else None
        if heads[1] >= 4 and rng.random() < 0.25:  # a rank of several
            ranks = rng.choice([2, 4])
            heads = (heads[0] // ranks, heads[1] // ranks)
        q_lens, k_lens = queries_and_keys(rng, kind)
        is_packed = kind == "prefill" and (model in DEEPSEEK or rng.random() < 0.7)
        page_size = 64 if kind == "latent" else 0 if is_packed else rng.choice(PAGES)
        causal = page_size > 0 or rng.random() > 0.1
        window = window if causal else None
        call = DrawnCall(
            kind, model, heads, tuple(q_lens), tuple(k_lens), page_size, window, causal
        )
        is_small = call.kv_bytes < MOST_BYTES and call.flops < MOST_FLOPS
        if is_small and sum(q_lens) <= MOST_TOKENS:
            return call


def draw_calls(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[DrawnCall]:
    """So many calls, of the kinds in turn."""
    rng = Random(seed)
    return [draw_call(rng, kinds[i % len(kinds)]) for i in range(count)]


class KindRatios(NamedTuple):
    """The distribution of ratios over the calls of a kind."""

    kind: str
    count: int
    median: float
    worst_twentieth: float
    worst: float


def by_kind(rows: Sequence[Mapping[str, Any]]) -> Iterator[KindRatios]:
    """Every kind that has rows, and all of them."""
    for kind in (*KINDS, "all"):
        ratios = sorted(row["ratio"] for row in rows if kind in (row["kind"], "all"))
        if ratios:
            yield KindRatios(
                kind, len(ratios), median(ratios), ratios[len(ratios) // 20], ratios[0]
            )
