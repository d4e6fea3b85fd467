"""All that decides which tokens may follow in a sequence, as masks for the sampler.

A mask has a bit for every token of the vocabulary, 32 in a word, the lowest first.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from anabranch.llm.grammar.bad_words import BadWords
from anabranch.llm.grammar.grammar_state import GrammarError, GrammarState, Words

SLOW_SECONDS = 0.02  # of a core, for a mask
MAX_SLOW_STEPS = 3  # after which a request ends


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def token_mask(tokens: Iterable[int], vocab_size: int) -> Words:
    """The mask of these tokens alone."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenRules:
    """Of one sequence: a grammar, a list of tokens, words that are banned; any may be missing."""

    def __init__(
        self, grammar: GrammarState | None, allowed: Words | None, bad_words: BadWords | None
    ) -> None:
        self._grammar, self._allowed, self._bad_words = grammar, allowed, bad_words
        self._output: list[int] = []
        self._ahead: Exception | bool = False  # whether the next token was taken, or an error
        self._num_slow = 0

    @property
    def over(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._grammar is not None and self._grammar.over

    def accept(self, token: int) -> None:
        """Take a token that was sampled."""
        ahead, self._ahead = self._ahead, False
        if isinstance(ahead, Exception):
            raise ahead
        if not ahead:
            self._take(token)

    def accept_ahead(self, token: int) -> None:
        """Take a token before `accept` is called with it, so that what follows can be asked for.

        What the grammar raises, `accept` raises. Called again, for a step that could not be
        launched, it does nothing.
        """
        if self._ahead is not False:
            return
        try:
            self._take(token)
            self._ahead = True
        except Exception as error:
            self._ahead = error

    def _take(self, token: int) -> None:
        self._output.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def leave_failed_lexer(self) -> None:
        """Go on with another lexer where another sequence brought this one to a bound."""
        if self._grammar is not None:
            self._grammar.leave_failed_lexer(self._output)

    def num_valid(self, drafts: Sequence[int]) -> int:
        """How many drafts, one after the other, the grammar takes."""
        return len(drafts) if self._grammar is None else self._grammar.num_valid(drafts)

    @property
    def _has_lists(self) -> bool:
        """Whether more than a grammar decides."""
        return self._allowed is not None or self._bad_words is not None

    @property
    def state(self) -> GrammarState | None:
        """Of the grammar, if there is one and something can follow."""
        return None if self._grammar is None or self._grammar.over else self._grammar

    def fill(
        self,
        masks: Words,
        drafts: Sequence[int],
        parents: Sequence[int],
        *,
        first_made: bool = False,
    ) -> None:
        """Write a mask for the next token, and one for what follows each draft.

        `parents` of drafts are earlier drafts, or -1. What cannot be reached is left as it is. With
        `first_made` the grammar's part of the first mask is there already.
        """
        if first_made and self._grammar is not None:
            self._grammar.check()
            if not (drafts or self._has_lists):
                return  # a grammar alone always leaves a token
        began = time.thread_time()  # not the wall clock: others may have the core
        self._fill(masks[0], (), made=first_made)
        if not masks[0].any():
            raise GrammarError("no token may follow: the grammar, bad_words and allowed_token_ids")
        walk = _Walk(self._grammar)
        for place, path in enumerate(draft_paths(drafts, parents)):
            if walk.go(path) and not self.over:
                self._fill(masks[1 + place], path)
        walk.go(())
        if time.thread_time() - began > SLOW_SECONDS * (1 + len(drafts)):
            self._num_slow += 1
        if self._num_slow >= MAX_SLOW_STEPS:
            raise GrammarError(
                f"the grammar is too slow: {self._num_slow} tokens took it more than "
                f"{1e3 * SLOW_SECONDS:.0f} ms each"
            )

    def _fill(self, mask: Words, path: Sequence[int], *, made: bool = False) -> None:
        if self._grammar is not None and not made:
            self._grammar.fill(mask)
        if self._allowed is not None:
            mask &= self._allowed
        if self._bad_words is not None:
            before = self._output[max(len(self._output) - self._bad_words.longest, 0) :]
            self._bad_words.ban(mask, [*before, *path])


class _Walk:
    """A grammar taken along drafts and back again."""

    def __init__(self, grammar: GrammarState | None) -> None:
        self._grammar = grammar
        self._path: tuple[int, ...] = ()

    def go(self, path: Sequence[int]) -> bool:
        """Stand after these drafts; False, and anywhere, if the grammar does not take them."""
        if self._grammar is None:
            return True
        common = 0
        for ours, wanted in zip(self._path, path, strict=False):
            if ours != wanted:
                break
            common += 1
        self._grammar.take_back(len(self._path) - common)
        self._path = self._path[:common]
        for token in path[common:]:
            if not self._grammar.accepts(token):
                return False
            self._path = (*self._path, token)
        return True


def draft_paths(drafts: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the first draft to each."""
    paths = list[tuple[int, ...]]()
    for token, parent in zip(drafts, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
