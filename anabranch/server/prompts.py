"""Prompts and conversations as tokens. Called from threads: a long text takes a while."""

from __future__ import annotations

from typing import Any, cast

from anabranch.server.chat_models import Message
from anabranch.server.errors import ApiError


class Encoder:
    """Makes tokens that the engine can take."""

    def __init__(
        self, tokenizer: Any | None, *, vocab_size: int, max_model_len: int, max_prompt_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_prompt_tokens = min(max_prompt_tokens, max_model_len - 1)

    def text(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text."""
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids", param="prompt")
        # a list goes through the tokenizer's batches, which do not hold the interpreter's lock
        encoded = self._tokenizer([text], add_special_tokens=special)["input_ids"]
        return cast("list[list[int]]", encoded)[0]

    def chat(self, messages: list[Message], *, generation_prompt: bool = True) -> list[int]:
        """Tokens of a conversation by the model's chat template."""
        from jinja2.exceptions import TemplateError  # of transformers' templates

        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        turns = [message.for_template() for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.text(cast("str", text), special=False)

    def fitted(self, ids: list[int], *, truncate: int | None, max_tokens: int | None) -> list[int]:
        """Tokens that leave room for an answer, or an error that says by how much they do not."""
        ids = ids if truncate is None else ids[-truncate:]
        if not ids:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        if (largest := max(ids)) >= self._vocab_size:
            raise ApiError(
                400, f"token id {largest} is not in the vocabulary of {self._vocab_size}"
            )
        if len(ids) > self._max_prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, the most is {self._max_prompt_tokens}; "
                "shorten it or set truncate_prompt_tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_tokens is not None and len(ids) + max_tokens > self._max_model_len:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens and max_tokens asks for {max_tokens}, together "
                f"more than the context of {self._max_model_len}; ask for at most "
                f"{self._max_model_len - len(ids)}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return ids
