"""The requests of a run: random prompts that any server can be given, or prompts of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from anabranch.bench.engine.prompts import Workload, random_workload
from anabranch.bench.serve.words import WORDS

if TYPE_CHECKING:
    from anabranch.bench.serve.api import Api
    from anabranch.bench.serve.options import ServeOptions

KEYS = ("messages", "prompt", "text", "question", "content")
SEED_STEP = 1_000_003  # between loads of one run, so that no prompt is met again
Content = str | list[int] | list[dict[str, Any]]


class Prompt(NamedTuple):
    """Text, token ids or messages, and how many tokens are asked for."""

    content: Content
    max_tokens: int

    def body(self, model: str, options: ServeOptions) -> dict[str, Any]:
        """As an endpoint takes it."""
        body: dict[str, Any] = {"model": model}
        if options.endpoint == "completions":
            body["prompt"] = self.content
        elif isinstance(self.content, str):
            body["messages"] = [{"role": "user", "content": self.content}]
        else:
            body["messages"] = self.content
        body |= {
            "max_tokens": self.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        return body | options.more_fields()


async def make_prompts(
    options: ServeOptions, api: Api, model: str, count: int, place: int
) -> list[Prompt]:
    """Prompts of one load, the same for the same seed and place."""
    seed = options.seed + SEED_STEP * place
    if options.prompts is not None:
        read = read_prompts(options.prompts, options.output_len, options.endpoint)
        order = np.random.default_rng(options.seed).permutation(len(read))
        return [read[order[(place * count + i) % len(read)]] for i in range(count)]
    return await _random_prompts(options, api, model, count, seed)


async def _random_prompts(
    options: ServeOptions, api: Api, model: str, count: int, seed: int
) -> list[Prompt]:
    def draw(vocab_size: int) -> Workload:
        return random_workload(
            count,
            options.input_len,
            options.output_len,
            vocab_size,
            range_ratio=options.range_ratio,
            seed=seed,
        )

    work = draw(len(WORDS))
    try:
        known = await api.tokenize(model, WORDS[0])
    except ValueError as error:  # no tokenizer: only ids can be sent
        if options.endpoint == "chat":
            raise ValueError(f"--endpoint chat needs a tokenizer: {error}") from None
        work = draw(options.vocab_size)
        return list(map(Prompt, work.prompts, work.output_lens))
    contents: list[Content] = []
    for ids in work.prompts:
        text = " ".join(WORDS[i] for i in ids)
        contents.append(
            text if known is None else await _cut(api, model, text, len(ids), options.endpoint)
        )
    return list(map(Prompt, contents, work.output_lens))


async def _cut(api: Api, model: str, text: str, length: int, endpoint: str) -> Content:
    """A text of at least `length` tokens as that many; a chat needs them as text again."""
    tokens = (await api.tokenize(model, text) or [])[:length]
    if endpoint == "completions" and tokens:
        return tokens
    return await api.detokenize(model, tokens) or text


def read_prompts(path: Path, output_len: int, endpoint: str) -> list[Prompt]:
    """Prompts of a file: JSON lines if it is named so, else a prompt a line."""
    if not path.is_file():
        raise FileNotFoundError(f"no prompts at {path}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix not in (".jsonl", ".json", ".ndjson"):
        return [Prompt(line, output_len) for line in lines]
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(_parse(json.loads(line), output_len, endpoint))
        except ValueError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from None
    return prompts


def _parse(given: Any, output_len: int, endpoint: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(given, output_len)
    fields: dict[str, Any] = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    content = next((fields[key] for key in KEYS if fields.get(key)), None)
    if not isinstance(content, (str, list)):
        raise ValueError(f"must be a string or have one of {', '.join(KEYS)}")
    is_messages = isinstance(content, list) and isinstance(content[0], dict)
    if is_messages and endpoint != "chat":
        raise ValueError("messages need --endpoint chat")
    if isinstance(content, list) and not is_messages and endpoint == "chat":
        raise ValueError("token ids need --endpoint completions")
    return Prompt(cast("Content", content), int(fields.get("max_tokens") or output_len))
