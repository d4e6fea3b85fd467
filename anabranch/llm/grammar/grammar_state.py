"""How far a sequence has come in its grammar, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anabranch.llm.grammar.lexers import Lexer, Lexers, LexerUse

Words = np.ndarray[Any, np.dtype[np.int32]]


class GrammarError(RuntimeError):
    """A grammar failed at one request: it ran out of time or memory, or nothing can follow."""


class GrammarState:
    """A matcher of llguidance. Tokens are taken one by one, and taken back."""

    def __init__(self, lexers: Lexers, use: LexerUse) -> None:
        self._lexers, self._use = lexers, use
        self._matcher = use.lexer.matcher.deep_copy()
        self.over = bool(self._matcher.is_stopped())  # whether nothing can follow

    @property
    def lexer(self) -> Lexer:
        """States with the same one wait for each other."""
        return self._use.lexer

    @property
    def matcher(self) -> Any:
        """The library's own object, for masks of many states at once."""
        return self._matcher

    def leave_failed_lexer(self, tokens: Sequence[int]) -> None:
        """If another sequence brought its lexer to a bound, take these tokens anew with another."""
        if self.lexer.failed and not self._matcher.is_error():
            self._use = self._lexers.use()
            self._matcher = self.lexer.matcher.deep_copy()
            self._matcher.consume_tokens(list(tokens))  # an error shows when a mask is made

    def accept(self, token: int) -> None:
        """Take a token that was sampled."""
        if not self._matcher.consume_token(token):
            self.lexer.failed = True
            raise GrammarError(f"the grammar cannot go on: {self._error()}")
        self.over = self._matcher.is_stopped()

    def accepts(self, token: int) -> bool:
        """Take a token if it may follow; whether it was."""
        if self.over or not self._matcher.validate_tokens([token]):
            return False
        self.accept(token)
        return True

    def take_back(self, num_tokens: int) -> None:
        """Undo as many tokens."""
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise GrammarError(f"the grammar cannot be rolled back: {self._error()}")
        self.over = self._matcher.is_stopped()

    def num_valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        return 0 if self.over else self._matcher.validate_tokens(list(tokens))

    def fill(self, words: Words) -> None:
        """Write the tokens that may follow, a bit each, the lowest first."""
        bits = self._matcher.compute_bitmask()
        self.check()
        words[:] = np.frombuffer(bits, np.int32, len(words))

    def check(self) -> None:
        """Raise if the last mask could not be made."""
        if self._matcher.is_error():
            self.lexer.failed = True
            raise GrammarError(f"the grammar took too much time or memory: {self._error()}")

    def _error(self) -> str:
        """The first line: the others show the state of the parser."""
        return str(self._matcher.get_error()).partition("\n")[0][:300]
