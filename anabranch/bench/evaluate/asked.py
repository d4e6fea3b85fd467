"""The questions of a run: which, in what style, and behind which examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from anabranch.bench.engine.bars import Progress
from anabranch.bench.evaluate.options import EvalOptions
from anabranch.bench.evaluate.questions import Question, Style, first_of_each, read_questions
from anabranch.bench.evaluate.tasks import load_task


class Asked(NamedTuple):
    """Questions, and the answered examples ahead of each."""

    questions: list[Question]
    examples: list[list[Question]]


def gather(options: EvalOptions, progress: Progress) -> Asked:
    """The questions that are asked, in their style, each with its examples."""

    def say(what: str) -> None:
        progress(what, 0, 0)

    if options.data is not None:
        loaded = read_questions(options.data)
    else:
        names = dict.fromkeys(name.strip() for name in options.tasks.split(","))
        loaded = [question for name in names for question in load_task(name, say)]
    style = options.prompt or ("letters" if options.mode == "generate" else None)
    if style is not None:
        loaded = [replace(question, style=Style(style)) for question in loaded]
    return with_examples(loaded, options.shots, options.limit)


def with_examples(questions: Sequence[Question], shots: int, limit: int | None) -> Asked:
    """The first questions of each subset are examples for the others of it."""
    shown: dict[str, list[Question]] = {}
    asked: list[Question] = []
    for question in questions:
        examples = shown.setdefault(question.subset, [])
        (examples if len(examples) < shots else asked).append(question)
    kept = first_of_each(asked, limit)
    if not kept:
        raise ValueError(f"{len(questions)} questions leave none to ask behind --shots {shots}")
    return Asked(kept, [shown[question.subset] for question in kept])
