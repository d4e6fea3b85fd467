"""What a user gives as a prompt, as tokens the model can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from anabranch.llm.sampling.params import SamplingParams

Prompt = str | Sequence[int]


def encode_prompt(
    prompt: Prompt,
    params: SamplingParams,
    *,
    tokenizer: Any | None,
    vocab_size: int,
    max_model_len: int,
) -> list[int]:
    """Tokens of a prompt, truncated from the left if asked to; refuses what cannot be run."""
    ids = _text_ids(prompt, tokenizer) if isinstance(prompt, str) else _given_ids(prompt)
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is not in the vocabulary of {vocab_size}")
    if params.truncate_prompt_tokens is not None:
        ids = ids[-params.truncate_prompt_tokens :]
    if not ids:
        raise ValueError("the prompt is empty")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; with room for one more, "
            f"max_model_len {max_model_len} allows {max_model_len - 1}"
        )
    return ids


def _text_ids(prompt: str, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    check_unicode(prompt)
    return cast("list[int]", tokenizer(prompt)["input_ids"])


def _given_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        raise ValueError(f"a prompt is text or a list of token ids, got {kind} {prompt!r:.80}")
    ids = list(cast("Sequence[Any]", prompt))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"a prompt of token ids holds integers, got {token!r:.80}")
    return ids


def message_text(message: Mapping[str, Any]) -> str:
    """The content of a message of a conversation: text, a list of text parts, or nothing."""
    content: Any = message.get("content")
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ValueError(
            f"the content of a message is text or a list of parts, got {content!r:.80}"
        )
    texts = [_part_text(part) for part in cast("list[Any]", parts)]
    for text in texts:
        check_unicode(text)
    return "".join(texts)


def _part_text(part: Any) -> str:
    found = part
    if isinstance(part, Mapping):
        found = cast("Mapping[str, Any]", part)
        if found.get("type") != "text":
            raise ValueError(
                f"a part of a message is of type 'text', got {found.get('type')!r:.80}"
            )
        found = found.get("text")
    if not isinstance(found, str):
        raise ValueError(f"a part of a message holds text, got {found!r:.80}")
    return found


def check_unicode(text: str) -> None:
    """Refuse text with a lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start]
        raise ValueError(
            f"the prompt is no valid Unicode: a lone surrogate {wrong!r} at {error.start}"
        ) from None
