"""Words that an answer must not contain, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from anabranch.llm.grammar.grammar_state import Words


class BadWords:
    """The last token of a word is banned where the others stand before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._by_start: list[tuple[tuple[int, ...], int]] = []
        for word in words:
            self._by_start.append((tuple(word[:-1]), word[-1]))
        self.longest = max((len(start) for start, _ in self._by_start), default=0)

    def ban(self, words: Words, output: Sequence[int]) -> None:
        """Clear the bits of tokens that would complete a word after `output`."""
        allowed = words.view(np.uint32)
        tail = tuple(output[-self.longest :]) if self.longest else ()
        for start, last in self._by_start:
            if not start or tail[-len(start) :] == start:
                allowed[last >> 5] &= np.uint32(~(1 << (last & 31)) & 0xFFFFFFFF)


def bad_word_tokens(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Tokens of each word, at the start of a text and after a space, as vLLM has it."""
    found = list[list[int]]()
    for word in words:
        plain: list[int] = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced: list[int] = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return [tokens for tokens in found if tokens]
