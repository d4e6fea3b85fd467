"""Questions asked, and what was answered: by likelihood or by words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.bench.evaluate.backend import Backend, Scored
from anabranch.bench.evaluate.prompts import context_of, continuations_of, matched_choice
from anabranch.bench.evaluate.questions import Question

Advance = Callable[[int, int], None]  # requests done, of


@dataclass(frozen=True, slots=True)
class Answer:
    """The choice that was taken, and what it was taken for."""

    choice: int | None  # None: no choice could be read from the text
    normalised: int | None = None  # the choice by log-likelihood a byte
    loglikelihoods: tuple[float, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def answer_by_likelihood(
    backend: Backend,
    questions: Sequence[Question],
    examples: Sequence[Sequence[Question]],
    advance: Advance,
) -> list[Answer]:
    """The likeliest choice of every question, as a whole and a byte."""
    asked = [
        Scored(context_of(question, shown), continuations_of(question))
        for question, shown in zip(questions, examples, strict=True)
    ]
    total = sum(len(each.continuations) for each in asked)
    sums = backend.loglikelihoods(asked, lambda done: advance(min(done, total), total))
    return [likeliest(found, each.continuations) for found, each in zip(sums, asked, strict=True)]


def likeliest(loglikelihoods: Sequence[float], continuations: Sequence[str]) -> Answer:
    """The first of the largest sums, and of the largest sums divided by UTF-8 bytes.

    The space ahead of a choice is not counted.
    """
    sizes = [len(text.removeprefix(" ").encode()) for text in continuations]
    a_byte = [value / size for value, size in zip(loglikelihoods, sizes, strict=True)]
    return Answer(_argmax(loglikelihoods), _argmax(a_byte), tuple(loglikelihoods))


def answer_in_words(
    backend: Backend,
    questions: Sequence[Question],
    examples: Sequence[Sequence[Question]],
    max_tokens: int,
    advance: Advance,
) -> list[Answer]:
    """The choice that each greedy continuation begins with."""
    pairs = zip(questions, examples, strict=True)
    prompts = [context_of(question, shown) for question, shown in pairs]
    total = len(prompts)
    found = backend.generate(prompts, max_tokens, lambda done: advance(min(done, total), total))
    return [
        Answer(
            matched_choice(question, each.text),
            text=each.text,
            token_ids=None if each.token_ids is None else tuple(each.token_ids),
        )
        for question, each in zip(questions, found, strict=True)
    ]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: (values[place], -place))
