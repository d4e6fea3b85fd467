"""Texts as tokens, and tokens as texts. Called from threads: a long text takes a while.

A text that cannot fit is refused before it is tokenized in full: by its bytes where they are more
than the longest tokens could hold, else by counting the tokens of its pieces, one by one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

from anabranch.llm.server.chat_models import Message
from anabranch.llm.server.errors import ApiError, refused

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\u2581"  # how sentencepiece writes a space
TOO_LONG = "context_length_exceeded"  # OpenAI's code
# Bytes of a text / bytes of its normal form, at most: Hangul letters become a syllable
SHRINKAGE = 3
LIKELY_CHARS = 8  # of a token: shorter texts are tokenized at once
PIECE_CHARS = 1 << 15
CUT_TOKENS = 64  # by which tokens of pieces may exceed those of the whole, for each cut


class TokenTexts:
    """Tokens of one tokenizer as bytes and as text. A model without one has no text."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._special: frozenset[int] = frozenset()
        self._byte_level = False
        if tokenizer is not None:
            self._special = frozenset(cast("list[int]", tokenizer.all_special_ids))
            self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; it may end inside a character."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find(token)
        return known

    def text_of(self, token: int) -> str:
        """The same, with replacement characters for what is no whole character."""
        return self.bytes_of(token).decode(errors="replace")

    @property
    def longest_bytes(self) -> int:
        if self._tokenizer is None:
            return 1
        vocab = cast("dict[str, int]", self._tokenizer.backend_tokenizer.get_vocab())
        return max((len(self._find(token)) for token in vocab.values()), default=1)

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark and not text."""
        return token in self._special

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        if self._tokenizer is None:
            return ""
        return cast("str", self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _find(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        piece = cast("str | None", self._tokenizer.backend_tokenizer.id_to_token(token))
        if piece is None:
            return b""  # the model has more rows than the tokenizer has tokens
        if self._byte_level:
            values = [_BYTE_OF.get(letter) for letter in piece]
            if token not in self._special and None not in values:
                return bytes(cast("list[int]", values))
            return piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE_PIECE, " ").encode()


class TokenStream:
    """The text of each token of a continuation; half a character waits for its other half."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._texts.bytes_of(token))


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


class PromptEncoder:
    """Tokenizes prompts, and refuses those that do not fit."""

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
                raise refused(
                    param,
                    f"the prompt has more than {self.max_prompt_bytes} bytes, which is more than "
                    f"{self._max_prompt_tokens} tokens hold; shorten it",
                    TOO_LONG,
                )

    def text(self, text: str, *, special: bool = True, unlimited: bool = False) -> list[int]:
        """Tokens of a text; `unlimited` if it may have more of them than a prompt."""
        if self._tokenizer is None:
            raise refused("prompt", "this model has no tokenizer: give token ids")
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
            message = f"the chat template refuses these messages: {error}"
            raise refused("messages", message) from error
        return self.text(cast("str", text), special=False, unlimited=unlimited)

    def fitted(self, ids: list[int], *, truncate: int | None, max_tokens: int | None) -> list[int]:
        """Tokens that leave room for an answer, or an error that says by how much they do not."""
        ids = ids if truncate is None else ids[-truncate:]
        if not ids:
            raise refused("prompt", "the prompt is empty; give at least one token")
        if len(ids) > self._max_prompt_tokens:
            raise self._too_long(f"{len(ids)} tokens")
        if (largest := max(ids)) >= self._vocab_size:
            raise ApiError(
                400, f"token id {largest} is not in the vocabulary of {self._vocab_size}"
            )
        if max_tokens is not None and len(ids) + max_tokens > self._max_model_len:
            raise refused(
                "max_tokens",
                f"the prompt has {len(ids)} tokens and max_tokens asks for {max_tokens}, together "
                f"more than the context of {self._max_model_len}; ask for at most "
                f"{self._max_model_len - len(ids)}",
                TOO_LONG,
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
        most = f"the prompt has {size}, the most is {self._max_prompt_tokens} tokens"
        message = f"{most}; shorten it or set truncate_prompt_tokens"
        return refused("prompt", message, TOO_LONG)
