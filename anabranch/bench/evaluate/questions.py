"""Multiple-choice questions, and files of them."""

from __future__ import annotations

import json
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

LETTERS = string.ascii_uppercase
REQUIRED = ("question", "choices", "answer")
OPTIONAL = ("subset", "passage")


class Style(Enum):
    """How a question is asked; `prompts.py` says what the model reads."""

    TEXT = "text"  # choices are not shown; the text of each is scored
    SENTENCE = "sentence"  # the same for the beginning of a sentence that a choice ends
    LETTERS = "letters"  # choices are listed; the letter of each is scored


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, what may be answered, and the place of the right answer."""

    text: str
    choices: tuple[str, ...]
    answer: int
    subset: str
    passage: str = ""
    style: Style = Style.TEXT

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("the question is empty")
        if not 2 <= len(self.choices) <= len(LETTERS):
            raise ValueError(f"there must be 2 to {len(LETTERS)} choices, got {len(self.choices)}")
        if not all(choice.strip() for choice in self.choices):
            raise ValueError(f"a choice is empty: {list(self.choices)}")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer {self.answer} is not one of {len(self.choices)} choices")


def read_questions(path: Path) -> list[Question]:
    """A jsonl file: `question`, `choices`, `answer`, and if wanted `subset` and `passage`.

    The answer is the number of a choice counted from 0, its letter, or its text.
    """
    questions: list[Question] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line), path.stem))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
    if not questions:
        raise ValueError(f"{path.name} holds no questions")
    return questions


def first_of_each(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """The first questions of every subset, in their order."""
    seen: Counter[str] = Counter()
    kept: list[Question] = []
    for question in questions:
        if limit is None or seen[question.subset] < limit:
            kept.append(question)
        seen[question.subset] += 1
    return kept


def _question(record: Any, subset: str) -> Question:
    if not isinstance(record, dict):
        raise ValueError(f"a question is an object, got {type(record).__name__}")
    fields = cast("dict[str, Any]", record)
    if missing := [name for name in REQUIRED if name not in fields]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if unknown := sorted(set(fields) - {*REQUIRED, *OPTIONAL}):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    for name in ("question", *OPTIONAL):
        if not isinstance(fields.get(name, ""), str):
            raise ValueError(f"{name} must be text, got {fields[name]!r}")
    choices = fields["choices"]
    if not isinstance(choices, list):
        raise ValueError(f"choices must be a list of texts, got {choices!r}")
    for choice in cast("list[Any]", choices):
        if not isinstance(choice, str):
            raise ValueError(f"choices must be texts, got {choice!r}")
    texts = tuple(cast("list[str]", choices))
    return Question(
        fields["question"],
        texts,
        place_of(fields["answer"], texts),
        fields.get("subset") or subset,
        fields.get("passage", ""),
    )


def place_of(answer: Any, choices: Sequence[str]) -> int:
    """From a number, a text, or a letter; a text that is also a letter counts as a text."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return answer
    if isinstance(answer, str) and answer in choices:
        return choices.index(answer)
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip() in letters:
        return letters.index(answer.strip())
    raise ValueError(f"answer {answer!r} is no choice, letter or number of one of {list(choices)}")
