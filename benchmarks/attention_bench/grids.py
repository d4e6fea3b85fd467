"""Which cases a benchmark runs: the merge grid, the peers' table, models, sweeps, the CPU's few."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from attention_bench.cases import AttendCase, Case, MergeCase, unite

MERGE_TOKENS = (256, 512, 613, 1024, 1536, 4096, 16384)
MERGE_HEADS = (16, 32, 48)
CACHED_MERGES = ((1024, 32, 128), (512, 64, 64), (333, 40, 128))  # fit into the cache of a GPU
CONTEXTS = (8192, 16384, 32768, 65536, 131072)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILLS = (1024, 2048, 4096, 8192, 16384, 32768)
_decode, _verify = partial(AttendCase, "decode"), partial(AttendCase, "verify")
# Query heads, kv heads, head dim, and the window of local layers, of well-known models.
MODELS: dict[str, tuple[int, int, int, int | None]] = {
    "Llama-3 8B": (32, 8, 128, None),
    "Llama-3 70B": (64, 8, 128, None),
    "Qwen3 0.6B": (16, 8, 128, None),
    "Qwen3 4B": (32, 8, 128, None),
    "Qwen3 14B": (40, 8, 128, None),
    "Qwen3 32B": (64, 8, 128, None),
    "Gemma 3 4B global": (8, 4, 256, None),
    "Gemma 3 4B local": (8, 4, 256, 1024),
    "Gemma 3 27B global": (32, 16, 128, None),
    "Gemma 3 27B local": (32, 16, 128, 1024),
    "SmolLM2 135M": (9, 3, 64, None),
}


def model_cases(case: AttendCase) -> list[AttendCase]:
    """The case with the heads of each model."""
    return [
        replace(
            case,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim,
            window=window,
            groups=("models",),
            models=(name,),
        )
        for name, (num_heads, num_kv_heads, head_dim, window) in MODELS.items()
    ]


def merge_cases() -> list[MergeCase]:
    """The grid of the merge, and small ones with states that are in the cache or not."""
    grid = [
        MergeCase(num_tokens, num_heads, dtype=dtype, groups=("grid",))
        for dtype in ("float16", "bfloat16", "float32")
        for num_heads in MERGE_HEADS
        for num_tokens in MERGE_TOKENS
    ]
    cached = [
        MergeCase(*shape, dtype=dtype, warm=warm, groups=("cached",))
        for dtype in ("float16", "bfloat16")
        for shape in CACHED_MERGES
        for warm in (True, False)
    ]
    return unite([*grid, *cached])


def decode_cases() -> list[AttendCase]:
    """One query for each sequence."""
    table = [_decode(1, 8192), _decode(8, 8192), _decode(64, 4096), _decode(128, 1024)]
    table += [_decode(1, 131072), _decode(16, 8192, num_heads=64)]
    return unite(
        [
            *_grouped("table", table),
            *model_cases(_decode(16, 8192)),
            *_grouped("context", (_decode(n, length) for n in (1, 8) for length in CONTEXTS)),
            *_grouped("batch", (_decode(size, 4096) for size in BATCHES)),
            *_grouped("pages", (_decode(8, 8192, page_size=page) for page in PAGES)),
        ]
    )


def verify_cases() -> list[AttendCase]:
    """A few queries for each sequence, as the drafts of a speculative decoder are."""
    table = [_verify(8, 8192, 4), _verify(64, 4096, 4), _verify(8, 259, 3, num_heads=64)]
    sizes = ((8, 8192), (64, 4096))
    return unite(
        [
            *_grouped("table", [*table, _verify(1, 32768, 8)]),
            *_grouped("queries", (_verify(*size, q) for size in sizes for q in (1, 2, 4, 8, 16))),
            *model_cases(_verify(16, 8192, 4)),
        ]
    )


def prefill_cases() -> list[AttendCase]:
    table = (
        _prefill(1, 8192, flex=True),
        _prefill(4, 4096),
        _prefill(2, 2048),
        _prefill(1, 16384),
        _prefill(8, 1024, num_heads=64, num_kv_heads=16, head_dim=64, head_dim_v=64),
        _prefill(1, 8192, num_heads=16, num_kv_heads=16, head_dim=192),
        _prefill(1, 8192, head_dim=256, head_dim_v=256),
    )
    return unite(
        [
            *_grouped("table", table),
            *model_cases(_prefill(1, 4096)),
            *_grouped("context", (_prefill(1, length) for length in PREFILLS)),
        ]
    )


def _prefill(num_seqs: int, seq_len: int, **shape: Any) -> AttendCase:
    return AttendCase("prefill", num_seqs, seq_len, seq_len, **shape)


def _grouped(group: str, cases: Iterable[AttendCase]) -> list[AttendCase]:
    return [replace(case, groups=(group,)) for case in cases]


def cpu_cases(bench: str) -> list[Case]:
    """Small sizes for a machine without a GPU, in float32."""
    heads: Any = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "head_dim_v": 64}
    if bench == "merge":
        return [case for case in merge_cases() if case.num_tokens <= 1024 and case.num_heads == 16]
    if bench == "prefill":
        cases = [_prefill(1, 256, **heads), _prefill(4, 512, **heads), _prefill(1, 1024)]
    else:
        q_len = 4 if bench == "verify" else 1
        small = _verify(1, 1024, q_len, **heads)
        cases = [small, replace(small, num_seqs=8), _verify(1, 4096, q_len)]
    return [replace(case, bench=bench, dtype="float32", groups=("cpu",)) for case in cases]


COMPOSITIONS = ("sparse", "cascade", "tree")


def load_suite(bench: str) -> Any:
    """The module with cases and implementations of a benchmark of lists, cascades or trees."""
    return import_module(f"attention_bench.compositions.{bench}_suite")


GPU_CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "merge": merge_cases,
    "decode": decode_cases,
    "verify": verify_cases,
    "prefill": prefill_cases,
}


def cases_of(bench: str, device: str, *, quick: bool = False, pattern: str = "") -> list[Case]:
    """The cases of a benchmark on a kind of device, those whose name or model has the pattern.

    `quick` keeps three of them, spread over the list.
    """
    if bench in COMPOSITIONS:
        cases: list[Case] = load_suite(bench).cases_of(device)
    else:
        cases = cpu_cases(bench) if device == "cpu" else list(GPU_CASES[bench]())
    wanted = pattern.lower()
    cases = [c for c in cases if wanted in " ".join((c.name, *c.models, *c.groups)).lower()]
    return cases[:: max(1, len(cases) // 3)][:3] if quick else cases
