"""Options of an evaluation, and the two settings of a comparison."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from anabranch.bench.engine.engine_options import EngineOptions
from anabranch.bench.engine.fields import check_positive, option, options_of
from anabranch.bench.evaluate.tasks import TASKS

MODES = ("likelihood", "generate")
PROMPTS = ("text", "sentence", "letters")
OFF_ON = ("off", "on")
DECODING = (  # of no effect when choices are scored as prompts
    "speculative",
    "draft_model",
    "num_drafts",
    "scorer",
    "adaptive",
    "graphs",
    "prefix_caching",
)


@dataclass(frozen=True, kw_only=True)
class JudgedOptions(EngineOptions):
    """An engine; every option of it can be compared."""

    adaptive: bool = option(False, "Fewer drafts, or none, when they do not pay.")
    page_size: int = option(16, "Tokens of a page of the KV cache.")
    kv_cache_gib: float | None = option(None, "Size of the KV cache.")
    prefix_caching: bool = option(True, "Reuse the KV of equal prefixes (--mode generate).")
    max_num_seqs: int | None = option(None, "Sequences at once: 64 on a GPU, 16 on a CPU.")
    max_num_batched_tokens: int | None = option(
        None, "Tokens of a step, at most: 8192 on a GPU, 1024 on a CPU."
    )

    def engine_config(self) -> dict[str, Any]:
        """As `EngineConfig` calls them, without the model."""
        added = ("page_size", "kv_cache_gib", "prefix_caching", "max_num_seqs")
        more = {name: getattr(self, name) for name in (*added, "max_num_batched_tokens")}
        return super().engine_config() | more


@dataclass(frozen=True, kw_only=True)
class EvalOptions(JudgedOptions):
    """Questions, how they are asked and of whom."""

    tasks: str = option("piqa", f"With commas between: {', '.join(TASKS)}.")
    data: Path | None = option(
        None,
        "A jsonl file instead: question, choices, answer (number from 0, letter or text), and if "
        "wanted subset and passage.",
        metavar="FILE",
    )
    limit: int | None = option(None, "The first questions of each subset only.")
    shots: int = option(0, "Answered questions of the subset ahead of each; they are not asked.")
    mode: str = option(
        "likelihood",
        "Take the likeliest choice, or generate and read the choice from the text.",
        choices=MODES,
    )
    prompt: str | None = option(
        None,
        "How questions are asked; each task's own way unless given, letters for --mode generate.",
        choices=PROMPTS,
    )
    max_tokens: int = option(8, "Of a generated answer.")
    compare: str | None = option(
        None,
        "Run the same questions under two settings of an engine option: speculative, graphs, "
        "scorer, prefix-caching (these with --mode generate), compile, or OPTION=A,B as in "
        "page-size=16,32.",
        metavar="OPTION[=A,B]",
    )
    base_url: str | None = option(
        None,
        "Ask an OpenAI endpoint instead of an engine: http://127.0.0.1:8000/v1.",
        metavar="URL",
    )
    compare_url: str | None = option(None, "A second endpoint to compare with.", metavar="URL")
    served_model: str | None = option(None, "Its name at the endpoint; the first one there.")
    api_key: str | None = option(None, "For the endpoint; OPENAI_API_KEY unless given.")
    concurrency: int = option(16, "Requests at once to an endpoint.")
    json: bool = option(False, "Print the results as JSON.")
    out: Path | None = option(None, "Write the results as JSON, with the commit and the machine.")
    samples: Path | None = option(None, "Write every question and its answers, as jsonl.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "limit", "max_tokens", "concurrency", "page_size")
        if self.shots < 0:
            raise ValueError(f"--shots must be at least 0, got {self.shots}")
        if self.compare_url is not None and self.base_url is None:
            raise ValueError("--compare-url needs --base-url")
        if self.compare is not None and self.base_url is not None:
            raise ValueError(
                "--compare changes an engine of this process; endpoints are compared by "
                "--base-url with --compare-url"
            )
        if self.compare_url is not None and self.compare_url == self.base_url:
            raise ValueError(f"--compare-url is --base-url itself: {self.base_url}")
        if self.compare is not None:
            self._check_compared(self.compare.partition("=")[0])

    def _check_compared(self, name: str) -> None:
        if name.replace("-", "_") in DECODING and self.mode != "generate":
            raise ValueError(
                f"--compare {name} needs --mode generate: scoring a choice decodes nothing"
            )
        if name == "scorer" and self.speculative == "off":
            raise ValueError("--compare scorer needs --speculative ngram or draft")
        variants(self)


def variants(options: EvalOptions) -> list[tuple[str, EvalOptions]]:
    """Settings to run, by what tells them apart."""
    if options.base_url is not None:
        urls = [options.base_url, *([options.compare_url] if options.compare_url else [])]
        return [(url, replace(options, base_url=url, compare_url=None)) for url in urls]
    if options.compare is None:
        return [(options.setting(), options)]
    name, _, listed = options.compare.partition("=")
    types = {each.name: each.type for each in options_of(JudgedOptions)}
    field = name.replace("-", "_")
    if field not in types:
        known = ", ".join(types).replace("_", "-")
        raise ValueError(f"--compare must name one of {known}, got {name!r}")
    values = tuple(listed.split(",")) if listed else _both(field, types[field], options)
    if len(values) != 2 or values[0] == values[1]:
        raise ValueError(
            f"--compare {name} needs two settings, as in {name}=A,B; got {listed or 'none'}"
        )
    return [(f"{name} {value}", _changed(options, field, types[field], value)) for value in values]


def _both(field: str, kind: type, options: EvalOptions) -> tuple[str, ...]:
    """Where an option has two settings, its name says it all."""
    if field == "speculative":
        return "off", "ngram" if options.speculative == "off" else options.speculative
    (found,) = [each for each in fields(JudgedOptions) if each.name == field]
    return OFF_ON if kind is bool else found.metadata["choices"]


def _changed(options: EvalOptions, field: str, kind: type, value: str) -> EvalOptions:
    name = field.replace("_", "-")
    if kind is bool and value not in OFF_ON:
        raise ValueError(f"--compare {name} is off or on, got {value!r}")
    try:
        changes: dict[str, Any] = {field: value == "on" if kind is bool else kind(value)}
    except ValueError as error:
        raise ValueError(f"--compare {name}: {error}") from error
    if field == "speculative" and value != "draft":
        changes["draft_model"] = None
    return replace(options, compare=None, **changes)
