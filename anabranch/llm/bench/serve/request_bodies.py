"""Bodies of the requests of a run: random prompts that any server takes, or prompts of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anabranch.llm.bench.serve.endpoint import Endpoint, as_dict
from anabranch.llm.bench.serve.load_options import LoadOptions
from anabranch.llm.bench.workload import random_workload

TEXT = (
    "about above across after again air all along also animal answer apple area back ball bank "
    "bear bed before begin best big bird black blue board boat body book both box boy bread bring "
    "build call car care case cat chair change child city clear close cloud cold color come cook"
)
COMMON_WORDS = TEXT.split(" ")  # most vocabularies have a token for each
KEYS = ("messages", "prompt", "text", "question", "content")
SEED_STEP = 1_000_003  # between the loads of one run, so that no prompt repeats
Content = Any  # a text, token ids, or messages


class PromptLine(NamedTuple):
    """A prompt, and how many tokens are asked for."""

    content: Content
    max_tokens: int


async def make_bodies(
    options: LoadOptions, endpoint: Endpoint, model: str, count: int, place: int
) -> list[dict[str, Any]]:
    """The bodies of one load, the same for the same seed and place."""
    if options.prompts is not None:
        read = read_prompts(options.prompts, options.output_len, options.endpoint)
        order: list[int] = np.random.default_rng(options.seed).permutation(len(read)).tolist()
        lines = [read[order[(place * count + i) % len(read)]] for i in range(count)]
    else:
        seed = options.seed + SEED_STEP * place
        lines = await _random_prompts(options, endpoint, model, count, seed)
    return [_body(line, model, options) for line in lines]


def _body(line: PromptLine, model: str, options: LoadOptions) -> dict[str, Any]:
    content = line.content
    if options.endpoint == "chat" and isinstance(content, str):
        content = [{"role": "user", "content": content}]
    field = "prompt" if options.endpoint == "completions" else "messages"
    body = streamed_body(model, line.max_tokens, options.temperature, options.ignore_eos)
    return body | {field: content} | options.extra_fields()


def streamed_body(
    model: str, max_tokens: int, temperature: float, ignore_eos: bool
) -> dict[str, Any]:
    """A request without its prompt."""
    return {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_eos else {}),
    }


async def _random_prompts(
    options: LoadOptions, endpoint: Endpoint, model: str, count: int, seed: int
) -> list[PromptLine]:
    """Token ids of common words, so that lengths are exact; words for a chat."""
    words: Sequence[Any] = COMMON_WORDS
    ids: Sequence[int] | None = None
    if options.endpoint == "completions":
        try:
            ids = await endpoint.tokenize(model, TEXT)
        except ValueError:  # no tokenizer: any ids
            ids = range(options.vocab_size)
    work = random_workload(
        count,
        options.input_len,
        options.output_len,
        len(ids or words),
        range_ratio=options.range_ratio,
        seed=seed,
    )
    contents = [
        " ".join(words[i] for i in drawn) if ids is None else [ids[i] for i in drawn]
        for drawn in work.prompts
    ]
    return list(map(PromptLine, contents, work.output_lens))


def read_prompts(path: Path, output_len: int, api: str) -> list[PromptLine]:
    """Prompts of a file: JSON lines if its name says so, else a prompt a line."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        return [PromptLine(line, output_len) for line in lines]
    try:
        return [_parse(json.loads(line), output_len, api) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(given: Any, output_len: int, api: str) -> PromptLine:
    record = as_dict(given)
    content: Any = next((record[key] for key in KEYS if record.get(key)), given)
    if not isinstance(content, (str, list)):
        raise ValueError(f"a prompt is a string or has one of {', '.join(KEYS)}, got {given!r}")
    if isinstance(content, list) and isinstance(content[0], dict) != (api == "chat"):
        raise ValueError(f"--endpoint chat takes messages, completions token ids, got {given!r}")
    return PromptLine(content, int(record.get("max_tokens") or output_len))
