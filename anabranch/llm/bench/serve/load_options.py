"""Options of `anabranch bench serve`."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from anabranch.llm.bench.bench_options import (
    COMPARE,
    OUT_HELP,
    RANGE_HELP,
    compared_settings,
    parse_sizes,
)
from anabranch.llm.cli.engine_options import ServingOptions
from anabranch.llm.cli.options import option


class Load(NamedTuple):
    """How many requests a server gets at once."""

    concurrency: int | None  # at most
    rate: float | None  # requests a second; None sends them as soon as the concurrency allows

    @property
    def label(self) -> str:
        parts = [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        parts += [] if self.rate is None else [f"{self.rate:g} requests/s"]
        return ", ".join(parts) or "all at once"


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ServingOptions):
    """Load an OpenAI endpoint, this server or another; report throughput and latency.

    $ anabranch bench serve --num-prompts 256 --concurrency 16
    $ anabranch bench serve --base-url http://host:8000 --request-rate 4 --prompts q.jsonl
    $ anabranch bench serve --sweep 1,2,4,8,16 --plot load.svg --out load.json
    $ anabranch bench serve --launch smollm2 --compare speculative --concurrency 8
    """

    base_url: str = option("http://127.0.0.1:8000", "The server, with or without /v1.")
    endpoint: str = option("completions", "Which API.", choices=("completions", "chat"))
    model: str | None = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "The model to ask for; the first of /v1/models unless given."
    )
    num_prompts: int = option(64, "Requests of a run.", at_least=1)
    concurrency: int | None = option(
        None, "Requests at once, at most; no limit unless given.", at_least=1
    )
    request_rate: float = option(
        math.inf, "Requests a second, at random times (Poisson); inf sends all at once.", above=0
    )
    input_len: int = option(128, "Tokens of a random prompt.", at_least=1)
    output_len: int = option(64, "Tokens of an answer, at most.", at_least=1)
    cases: str | None = option(
        None, "Lengths to run one after the other, input x output: '4096x1024,8192x64'."
    )
    range_ratio: float = option(0.0, RANGE_HELP, at_least=0, below=1)
    prompts: Path | None = option(
        None, "Prompts of a file instead: one a line, or .jsonl with prompt, text or messages."
    )
    vocab_size: int = option(
        32000, "Random token ids are below this, for a server without a tokenizer.", at_least=1
    )
    ignore_eos: bool = option(False, "Answers have the full length (vLLM, llama.cpp and ours).")
    temperature: float = option(0.0, "Temperature of sampling.")
    extra_body: str | None = option(
        None, "JSON fields for every request: '{\"speculate\": false}'.", metavar="JSON"
    )
    seed: int = option(0, "Seed of prompts and arrival times.")
    api_key: str | None = option(None, "Sent as Authorization: Bearer KEY.")
    warmup: int = option(1, "Requests before the measurement.", at_least=0)
    timeout: float = option(600.0, "Seconds after which a request counts as failed.", above=0)
    sweep: str | None = option(None, "Concurrencies to run one after the other: '1,2,4,8'.")
    plot: Path | None = option(None, "Draw latency and throughput against load into this file.")
    out: Path | None = option(None, OUT_HELP)
    launch: str | None = option(
        None, "Serve this model for the run, with the engine options below.", metavar="MODEL"
    )
    compare: str | None = option(
        None, "With --launch: run both settings of this, side by side.", choices=COMPARE
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None and self.sweep is None:
            raise ValueError("--plot draws against load: give --sweep, too")
        if self.compare is not None and self.launch is None:
            raise ValueError("--compare needs --launch MODEL")
        self.each_case()
        self.extra_fields()
        self.loads()

    def each_case(self) -> list[LoadOptions]:
        if self.cases is None:
            return [self]
        sizes = parse_sizes(self.cases, "4096x1024,8192x64")
        return [replace(self, cases=None, input_len=i, output_len=o) for i, o in sizes]

    @property
    def longest(self) -> int | None:
        """Tokens of a sequence, at most, where that is known."""
        if self.prompts is not None or self.endpoint == "chat":
            return None
        cases = [(case.input_len, case.output_len) for case in self.each_case()]
        return max(sum(round(size * (1 + self.range_ratio)) for size in case) for case in cases)

    def extra_fields(self) -> dict[str, Any]:
        """What --extra-body adds to a request."""
        try:
            given: Any = json.loads(self.extra_body or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise ValueError(f"--extra-body must be a JSON object, got {self.extra_body!r}")
        return cast("dict[str, Any]", given)

    def loads(self) -> list[Load]:
        """One load, or those of the sweep."""
        rate = None if math.isinf(self.request_rate) else self.request_rate
        values = [self.concurrency] if self.sweep is None else self.sweep.split(",")
        if not all(value is None or (f"{value}".isdecimal() and int(value)) for value in values):
            raise ValueError(f"--sweep must be numbers above 0 with commas, got {self.sweep!r}")
        return [Load(None if value is None else int(value), rate) for value in values]

    def settings(self) -> dict[str, LoadOptions]:
        """The settings to run one after the other, by name."""
        if self.launch is None:
            return {self.base_url: self}
        found = compared_settings(self, self.compare)
        names = [each.setting() for each in found]
        if len(set(names)) < len(names):  # a switch that settings do not mention
            names = [f"{self.compare} {value}" for value in ("off", "on")]
        return dict(zip(names, found, strict=True))
