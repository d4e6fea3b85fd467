"""Options of `anabranch bench soak`."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabranch.bench.engine.bench_options import OUT_HELP
from anabranch.cli.engine_options import SPECULATIVE, ServingOptions
from anabranch.cli.options import option


@dataclass(frozen=True, kw_only=True)
class SoakOptions(ServingOptions):
    """Serve a model to many clients for minutes; some disconnect mid-stream.

    All others must be answered, and no page of the cache may stay in use.

    $ anabranch bench soak --clients 8 --seconds 10
    """

    speculative: str = option("ngram", "Where drafts come from.", choices=SPECULATIVE)
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
