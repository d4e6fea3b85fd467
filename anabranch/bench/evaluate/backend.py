"""What answers questions, wherever it runs, and where a choice begins among tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

Advance = Callable[[int], None]  # called with how many requests are done


class Scored(NamedTuple):
    """A context, and each continuation that it is scored with."""

    context: str
    continuations: list[str]


class Continuation(NamedTuple):
    """What was generated; an endpoint tells the text only."""

    text: str
    token_ids: list[int] | None = None


class Backend(Protocol):
    """A model behind an engine or an endpoint."""

    @property
    def notes(self) -> list[str]:
        """What a reader of the results must know about this run."""
        ...

    def loglikelihoods(self, asked: Sequence[Scored], advance: Advance) -> list[list[float]]:
        """Of every continuation, the sum over its tokens of log p(token | all before it)."""
        ...

    def generate(
        self, prompts: Sequence[str], max_tokens: int, advance: Advance
    ) -> list[Continuation]:
        """The most likely tokens behind every prompt."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


def choice_start(context: Sequence[Any], whole: Sequence[Any]) -> int:
    """How many tokens of context + choice are the context's own.

    Both are tokenised whole, since a token may reach over the boundary; such a token belongs to
    the choice. The first token has nothing before it to be likely after, so it never does.
    """
    same = takewhile(lambda pair: pair[0] == pair[1], zip(context, whole, strict=False))
    start = max(sum(1 for _ in same), 1)
    if start >= len(whole):
        raise ValueError("a choice has no tokens of its own")
    return start
