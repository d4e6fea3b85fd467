"""Prompts and conversations as tokens. Called from threads: a long text takes a while.

A text that cannot fit is refused before it is tokenized in full: by its bytes where they are more
than the longest tokens could hold, else by counting the tokens of its pieces, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from anabranch.llm.server.chat_models import Message
from anabranch.llm.server.errors import ApiError
from anabranch.llm.server.token_texts import TokenTexts

SHRINKAGE = (
    3  # bytes of a text / bytes of its normal form, at most: Hangul letters become a syllable
)
LIKELY_CHARS = 8  # of a token: shorter texts are tokenized at once
PIECE_CHARS = 1 << 15
CUT_TOKENS = 64  # by which tokens of pieces may exceed those of the whole, for each cut


class PromptEncoder:
    """Makes tokens that the engine can take."""

    def __init__(
        self, tokenizer: Any | None, *, vocab_size: int, max_model_len: int, max_prompt_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_prompt_tokens = min(max_prompt_tokens, max_model_len - 1)
        longest = TokenTexts(tokenizer).longest_bytes
        self.max_prompt_bytes = self._max_prompt_tokens * longest * SHRINKAGE
        if tokenizer is not None:
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()

    def refuse_by_bytes(self, texts: Iterable[str], param: str) -> None:
        """Refuse a prompt, made of all these texts, whose length alone says that it cannot fit."""
        if self._tokenizer is None:
            return
        size = 0
        for text in texts:
            # a character has at least a byte and at most four
            size += len(text) if len(text) * 4 <= self.max_prompt_bytes else len(text.encode())
            if size > self.max_prompt_bytes:
                raise ApiError(
                    400,
                    f"the prompt has more than {self.max_prompt_bytes} bytes, which is more than "
                    f"{self._max_prompt_tokens} tokens hold; shorten it",
                    param=param,
                    code="context_length_exceeded",
                )

    def text(self, text: str, *, special: bool = True, unlimited: bool = False) -> list[int]:
        """Tokens of a text; `unlimited` if it may have more of them than a prompt."""
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids", param="prompt")
        if not unlimited and self._surely_too_long(text):
            raise self._too_long(f"more than {self._max_prompt_tokens} tokens")
        return self._encode(text, special)

    def chat(
        self,
        messages: list[Message],
        *,
        generation_prompt: bool = True,
        unlimited: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Tokens of a conversation by the model's chat template, which sees the variables."""
        from jinja2.exceptions import TemplateError  # of transformers' templates

        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions")
        asks = "content'] is none" in str(self._tokenizer.chat_template)  # as DeepSeek's do
        turns = [message.for_template(none_for_calls=asks) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=generation_prompt, tokenize=False, **variables
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ApiError(
                400, f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.text(cast("str", text), special=False, unlimited=unlimited)

    def fitted(self, ids: list[int], *, truncate: int | None, max_tokens: int | None) -> list[int]:
        """Tokens that leave room for an answer, or an error that says by how much they do not."""
        ids = ids if truncate is None else ids[-truncate:]
        if not ids:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        if len(ids) > self._max_prompt_tokens:
            raise self._too_long(f"{len(ids)} tokens")
        if (largest := max(ids)) >= self._vocab_size:
            raise ApiError(
                400, f"token id {largest} is not in the vocabulary of {self._vocab_size}"
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

    def _encode(self, text: str, special: bool) -> list[int]:
        # batches do not hold the interpreter's lock, and the fast kind computes no offsets
        backend = cast("Any", self._tokenizer).backend_tokenizer
        return backend.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def _surely_too_long(self, text: str) -> bool:
        if len(text) <= max(LIKELY_CHARS * self._max_prompt_tokens, PIECE_CHARS):
            return False
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            num_tokens += max(len(self._encode(piece, False)) - CUT_TOKENS, 0)
            if num_tokens > self._max_prompt_tokens:
                return True
        return False

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            400,
            f"the prompt has {size}, the most is {self._max_prompt_tokens} tokens; "
            "shorten it or set truncate_prompt_tokens",
            param="prompt",
            code="context_length_exceeded",
        )
