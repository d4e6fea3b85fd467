"""Options of the engine's benchmarks, and of the two settings that a comparison runs."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from anabranch.llm.cli.engine_options import SCORERS, EngineOptions
from anabranch.llm.cli.options import option, options_of

SWITCHES = tuple(each.flag[2:] for each in options_of(EngineOptions) if each.type is bool)
COMPARE = ("speculative", "scorer", *SWITCHES)
ENGINE, TRANSFORMERS_PREFIX = "anabranch", "transformers-"
RANGE_HELP = "Lengths vary by this much: 0.5 draws from half to one and a half times."
OUT_HELP = "Write the results as JSON, with the commit and the machine."
Options = TypeVar("Options", bound=EngineOptions)


def compared_settings(options: Options, compare: str | None) -> list[Options]:
    """The settings to run one after the other: both of what is compared, or the one given."""
    if compare is None:
        return [options]
    method = "ngram" if options.speculative == "off" else options.speculative
    if compare == "scorer":
        return [replace(options, speculative=method, scorer=name) for name in SCORERS]
    if compare == "speculative":
        plain = replace(options, speculative="off", draft_model=None)
        return [plain, replace(options, speculative=method)]
    switch = compare.replace("-", "_")
    return [replace(options, **{switch: on}) for on in (False, True)]


def parse_sizes(cases: str, example: str, flag: str = "--cases") -> list[tuple[int, ...]]:
    """The numbers of '8x1024x128,64x4096x64'; as many for each case as the example has."""
    sizes = [case.split("x") for case in cases.split(",")]
    length = example.partition(",")[0].count("x") + 1
    if any(len(size) != length or not all(map(str.isdecimal, size)) for size in sizes):
        raise ValueError(f"{flag} must be like {example}, got {cases!r}")
    return [tuple(map(int, size)) for size in sizes]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(EngineOptions):
    """An engine, and where the results go."""

    out: Path | None = option(None, OUT_HELP)

    def sized(self, num_tokens: int, num_seqs: int | None) -> dict[str, Any]:
        """Engine settings for sequences of this length, all running at once, nothing reused."""
        drafts = self.num_drafts if self.speculative != "off" else 0
        return {
            "max_model_len": self.max_model_len or num_tokens + drafts,
            "max_num_seqs": num_seqs,
            "prefix_caching": False,
        }


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """Time a batch from its prompts to its last token: mean and percentiles.

    $ anabranch bench latency --input-len 1024 --output-len 128 --batch 8
    $ anabranch bench latency --speculative ngram --compare scorer --out latency.json
    """

    input_len: int = option(32, "Tokens of a prompt.", at_least=1)
    output_len: int = option(128, "Tokens of an answer.", at_least=1)
    batch: int = option(1, "Prompts at once.", at_least=1)
    cases: str | None = option(
        None, "Several cases by one engine: '8x1024x128,64x4096x64', batch x input x output."
    )
    iterations: int = option(5, "Measured runs.", at_least=1)
    warmup: int = option(1, "Runs before those.", at_least=0)
    compare: str | None = option(None, "Run both settings of this.", choices=COMPARE)
    profile: Path | None = option(
        None, "Folder for a torch profiler trace and a picture of the stages.", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.each_case()

    def each_case(self) -> list[LatencyOptions]:
        if self.cases is None:
            return [self]
        sizes = parse_sizes(self.cases, "8x1024x128,64x4096x64")
        return [replace(self, cases=None, batch=b, input_len=i, output_len=o) for b, i, o in sizes]


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """Measure requests and tokens a second, with all prompts given at once.

    $ anabranch bench throughput --num-prompts 256 --input-len 512 --output-len 128
    $ anabranch bench throughput --range-ratio 0.5 --peer transformers
    """

    num_prompts: int = option(64, "How many prompts.", at_least=1)
    input_len: int = option(128, "Tokens of a prompt.", at_least=1)
    output_len: int = option(64, "Tokens of an answer.", at_least=1)
    range_ratio: float = option(0.0, RANGE_HELP, at_least=0, below=1)
    max_num_seqs: int | None = option(
        None, "Sequences at once: 64 on a GPU, 16 on a CPU.", at_least=1
    )
    peer: str | None = option(None, "Also run this.", choices=("transformers",))
    peer_attention: str = option("sdpa", "Of the peer; several with commas: 'sdpa,anabranch'.")
    seed: int = option(0, "Seed of the prompts.")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(BenchOptions):
    """Measure prompt and generation speed against context, beside transformers.

    $ anabranch bench sweep --contexts 512,1024,2048 --out sweep.json --plot sweep.svg
    $ anabranch bench sweep --impls anabranch,transformers-eager
    $ anabranch bench sweep --impls anabranch --kv-cache-dtype auto,q8_0,fp8
    """

    contexts: str = option("128,512,1024,2048,4096,8192,16384", "Prompt lengths, with commas.")
    generate: int = option(128, "Tokens after each prompt.", at_least=1)
    repeats: int = option(3, "Measured runs; mean and spread are shown.", at_least=1)
    impls: str = option(
        "anabranch,transformers-sdpa,transformers-eager",
        "Implementations, with commas: anabranch is this engine, transformers-NAME is "
        "transformers with the attention implementation NAME (sdpa, eager, anabranch).",
    )
    kv_cache_dtype: str = option("auto", "Formats of the engine's KV cache, with commas.")
    plot: Path | None = option(None, "Draw the speeds against context into this file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _listed(self.impls):
            if name != ENGINE and not name.startswith(TRANSFORMERS_PREFIX):
                raise ValueError(f"--impls must be anabranch or transformers-NAME, got {name!r}")
        self.lengths()

    def contenders(self) -> dict[str, SweepOptions]:
        """What is run, by name: the engine for each format of its cache, and the others."""
        found: dict[str, SweepOptions] = {}
        caches = _listed(self.kv_cache_dtype)
        for name in _listed(self.impls):
            for cache in caches if name == ENGINE else caches[:1]:
                label = f"{name} {cache}" if name == ENGINE and len(caches) > 1 else name
                found[label] = replace(self, impls=name, kv_cache_dtype=cache)
        return found

    def lengths(self) -> list[int]:
        """Prompt lengths, the shortest first."""
        given = _listed(self.contexts)
        if not all(part.isdecimal() and int(part) > 0 for part in given):
            raise ValueError(f"--contexts must be numbers with commas, got {self.contexts!r}")
        return sorted(map(int, given))


def _listed(given: str) -> list[str]:
    return [part.strip() for part in given.split(",")]
