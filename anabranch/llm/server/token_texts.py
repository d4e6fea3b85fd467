"""The text of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, cast

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_PIECE = "\u2581"  # how sentencepiece writes a space


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
        """Bytes of the longest token."""
        if self._tokenizer is None:
            return 1
        vocab = cast("dict[str, int]", self._tokenizer.backend_tokenizer.get_vocab())
        return max((len(self._find(token)) for token in vocab.values()), default=1)

    def is_special(self, token: int) -> bool:
        """Whether it marks something and is no text."""
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
        """What this token completes."""
        return self._decoder.decode(self._texts.bytes_of(token))


def _byte_letters() -> dict[str, int]:
    """Byte-level vocabularies write printable bytes as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
