"""Options of `anabranch bench serve`."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from anabranch.bench.engine.engine_options import SCORERS, BenchOptions, EngineOptions
from anabranch.bench.engine.fields import check_positive, option, options_of

ENDPOINTS = ("completions", "chat")
SWITCHES = tuple(each.flag[2:] for each in options_of(EngineOptions) if each.type is bool)
COMPARE = ("speculative", "scorer", *SWITCHES)
SWEEPS = ("concurrency", "rate")


class Load(NamedTuple):
    """How hard a server is pressed."""

    concurrency: int | None  # requests under way at once, at most
    rate: float | None  # requests a second; None sends them as soon as they may

    @property
    def label(self) -> str:
        """In a few words."""
        words = [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        words += [] if self.rate is None else [f"{self.rate:g} requests/s"]
        return ", ".join(words) or "all at once"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(BenchOptions):
    """A server, a load, and what to do with the results."""

    base_url: str = option("http://127.0.0.1:8000", "The server, with or without /v1.")
    endpoint: str = option("completions", "What is asked.", choices=ENDPOINTS)
    model: str | None = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        None, "The model to ask for; the first of /v1/models unless given."
    )
    num_prompts: int = option(64, "Requests of a run.")
    concurrency: int | None = option(None, "Requests under way at once; no limit unless given.")
    request_rate: float = option(
        math.inf, "Requests a second, at random times (Poisson); inf sends all at once."
    )
    input_len: int = option(128, "Tokens of a random prompt.")
    output_len: int = option(64, "Tokens of an answer, at most.")
    cases: str | None = option(
        None,
        "Lengths to run one after the other, input x output: '4096x1024,8192x64'.",
        metavar="INxOUT,..",
    )
    range_ratio: float = option(
        0.0, "Random lengths vary by this much: 0.5 draws from half to one and a half times."
    )
    prompts: Path | None = option(
        None,
        "Prompts of a file instead: one a line, or .jsonl with prompt, text or messages.",
        metavar="FILE",
    )
    vocab_size: int = option(
        32000, "Random token ids are below this, for a server without a tokenizer."
    )
    ignore_eos: bool = option(False, "Answers have the full length (vLLM, llama.cpp and ours).")
    temperature: float = option(0.0, "Of sampling.")
    extra_body: str | None = option(
        None, "JSON fields for every request: '{\"speculate\": false}'.", metavar="JSON"
    )
    seed: int = option(0, "Of prompts and arrival times.")
    api_key: str | None = option(None, "Sent as Authorization: Bearer KEY.")
    warmup: int = option(1, "Requests before the clock runs.")
    timeout: float = option(600.0, "Seconds after which a request counts as failed.")
    sweep: str | None = option(
        None, "Run one load after the other: '1,2,4,8,16'.", metavar="VALUES"
    )
    sweep_over: str = option("concurrency", "What --sweep gives.", choices=SWEEPS)
    plot: Path | None = option(None, "Draw latency and throughput against load into this file.")
    launch: str | None = option(
        None, "Serve this model for the run, with the engine options below.", metavar="MODEL"
    )
    max_num_seqs: int | None = option(None, "With --launch: sequences at once.")
    engine: bool = option(
        False, "With --launch: time the engine alone, too, under the last setting."
    )
    compare: str | None = option(
        None, "With --launch: run both settings of this, side by side.", choices=COMPARE
    )
    compare_env: str | None = option(
        None,
        "With --launch: run with each value of an environment variable, side by side.",
        metavar="NAME=A,B",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            self,
            "num_prompts", "concurrency", "input_len", "output_len", "vocab_size", "max_num_seqs",
        )  # fmt: skip
        _check_above_zero(self, "request_rate", "timeout")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}")
        if self.warmup < 0:
            raise ValueError(f"--warmup must be at least 0, got {self.warmup}")
        if self.plot is not None and self.sweep is None:
            raise ValueError("--plot draws against load: give --sweep, too")
        self._check_comparison()
        self._check_engine()
        self.each_case()
        self.more_fields()
        self.loads()

    def _check_comparison(self) -> None:
        asked = [name for name in ("compare", "compare_env") if getattr(self, name)]
        if asked and self.launch is None:
            raise ValueError(f"--{asked[0].replace('_', '-')} needs --launch MODEL")
        if len(asked) > 1:
            raise ValueError("give either --compare or --compare-env")
        if self.compare_env is not None:
            name, _, values = self.compare_env.partition("=")
            if not name or len([value for value in values.split(",") if value]) < 2:
                raise ValueError(f"--compare-env must be NAME=A,B, got {self.compare_env!r}")

    def _check_engine(self) -> None:
        if self.engine and self.launch is None:
            raise ValueError("--engine needs --launch MODEL")
        if self.engine and (self.endpoint != "completions" or self._has_rates):
            raise ValueError("--engine needs --endpoint completions, and no rate of requests")

    @property
    def _has_rates(self) -> bool:
        return any(load.rate is not None for load in self.loads())

    def each_case(self) -> list[ServeOptions]:
        """These options with each of the lengths."""
        if self.cases is None:
            return [self]
        sizes = [case.split("x") for case in self.cases.split(",")]
        if any(len(size) != 2 or not all(map(str.isdecimal, size)) for size in sizes):
            raise ValueError(f"--cases must be like 4096x1024,8192x64, got {self.cases!r}")
        return [replace(self, cases=None, input_len=int(i), output_len=int(o)) for i, o in sizes]

    @property
    def sizes(self) -> str:
        """Of a random request, in a few words."""
        return f"{self.input_len} in, {self.output_len} out"

    @property
    def longest(self) -> int | None:
        """Tokens of a sequence, at most, where that is known."""
        if self.prompts is not None or self.endpoint == "chat":
            return None
        largest = 1 + self.range_ratio
        return max(
            round(case.input_len * largest) + round(case.output_len * largest)
            for case in self.each_case()
        )

    def more_fields(self) -> dict[str, Any]:
        """What --extra-body adds to a request."""
        try:
            fields: Any = json.loads(self.extra_body or "{}")
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"--extra-body must be a JSON object, got {self.extra_body!r}")
        return cast("dict[str, Any]", fields)

    def loads(self) -> list[Load]:
        """One, or those of the sweep."""
        rate = None if math.isinf(self.request_rate) else self.request_rate
        if self.sweep is None:
            return [Load(self.concurrency, rate)]
        try:
            values = [float(value) for value in self.sweep.split(",")]
        except ValueError:
            raise ValueError(f"--sweep must be numbers with commas, got {self.sweep!r}") from None
        whole = self.sweep_over == "concurrency"
        if any(not value > 0 or (whole and not value.is_integer()) for value in values):
            kind = "whole numbers" if whole else "numbers"
            raise ValueError(f"--sweep must be {kind} above 0, got {self.sweep!r}")
        if whole:
            return [Load(int(value), rate) for value in values]
        return [Load(self.concurrency, None if math.isinf(v) else v) for v in values]

    def variants(self) -> list[Variant]:
        """The settings to run, one after the other."""
        if self.compare_env is not None:
            name, _, values = self.compare_env.partition("=")
            return [
                Variant(f"{name}={value}", self, {name: value})
                for value in values.split(",")
                if value
            ]
        if self.compare is None:
            return [Variant(self.setting() if self.launch else self.base_url, self, {})]
        method = "ngram" if self.speculative == "off" else self.speculative
        if self.compare == "scorer":
            settings = [replace(self, speculative=method, scorer=name) for name in SCORERS]
        elif self.compare == "speculative":
            plain = replace(self, speculative="off", draft_model=None)
            settings = [plain, replace(self, speculative=method)]
        else:
            switch = self.compare.replace("-", "_")
            settings = [replace(self, **{switch: on}) for on in (False, True)]
        names = [each.setting() for each in settings]
        if len(set(names)) < len(names):  # a switch that settings do not mention
            names = [f"{self.compare} {value}" for value in ("off", "on")]
        return [Variant(name, each, {}) for name, each in zip(names, settings, strict=True)]


class Variant(NamedTuple):
    """One setting of a comparison."""

    name: str
    options: ServeOptions
    environment: dict[str, str]


def _check_above_zero(given: object, *names: str) -> None:
    for name in names:
        value = getattr(given, name)
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
