"""Options of the engine's benchmarks that need the source tree."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.llm.bench.bench_options import OUT_HELP, BenchOptions
from anabranch.llm.cli.engine_options import DRAFTS, SPECULATIVE, ServingOptions
from anabranch.llm.cli.options import option


@dataclass(frozen=True, kw_only=True)
class ScorersOptions(BenchOptions):
    """Time one step that scores drafts, by each scorer, and a plain decode step.

    $ anabranch bench scorers --model dummy:llama-3.1-8b --batch 64 --context 4096
    """

    batch: int = option(8, "Sequences.", at_least=1)
    context: int = option(512, "Keys of each sequence.", at_least=1)
    repeats: int = option(10, "Measured runs; the median is shown.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TreeOptions(BenchOptions):
    """Count tokens a verification: trees of n-grams beside chains of as many drafts.

    $ anabranch bench drafts --sizes 8,16,32 --seeds 3 --out drafts.json
    """

    tree_width: int = option(4, "Of the trees.", at_least=1)
    sizes: str = option("8,16,32", "Numbers of drafts, with commas.")
    seeds: int = option(3, "Answers to a prompt, the first greedy.", at_least=1)
    output_len: int = option(192, "Tokens of an answer, at most.", at_least=1)
    file: Path | None = option(None, "Text of the tasks; examples/river.txt unless given.")


@dataclass(frozen=True, kw_only=True)
class CpuOptions(BenchOptions):
    """Compare the engine on a CPU with transformers, with drafts, and batched.

    $ anabranch bench cpu --output-len 64 --repeats 3 --out cpu.json
    """

    output_len: int = option(64, "Tokens of an answer.", at_least=1)
    prompts: int = option(8, "Prompts of the batch.", at_least=1)
    repeats: int = option(3, "Rounds; everything runs once in each, medians are shown.", at_least=1)
    file: Path | None = option(None, "Text to summarise; examples/river.txt unless given.")


@dataclass(frozen=True, kw_only=True)
class SoakOptions(ServingOptions):
    """Serve a model to many clients for minutes; some disconnect mid-stream.

    All others must be answered, and no page of the cache may stay in use.

    $ anabranch bench soak --clients 8 --seconds 10
    """

    speculative: str | None = option(None, DRAFTS, choices=SPECULATIVE)
    clients: int = option(
        64, "Clients at once; each sends a request when its last is answered.", at_least=1
    )
    seconds: float = option(120.0, "For how long new requests are sent.", above=0)
    input_words: int = option(16, "Random words of a prompt.", at_least=1)
    output_len: int = option(64, "Tokens of an answer.", at_least=1)
    vanish: float = option(
        0.05, "Share of the requests whose client disconnects mid-stream.", at_least=0, below=1
    )
    timeout: float = option(600.0, "Seconds after which a request counts as failed.", above=0)
    seed: int = option(0, "Seed of the prompts and of who disconnects.")
    out: Path | None = option(None, OUT_HELP)
