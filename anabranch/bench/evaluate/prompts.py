r"""What the model reads, as in lm-eval, and what is scored behind it.

    text        [PASSAGE\n]Question: QUESTION\nAnswer:                   " " + each choice
    sentence    [PASSAGE\n]QUESTION                                      " " + each choice
    letters     [PASSAGE\n]Question: QUESTION\nA. ...\nB. ...\nAnswer:   " A", " B", ...

Answered examples, if any, come first, with blank lines between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anabranch.bench.evaluate.questions import LETTERS, Question, Style


def context_of(question: Question, examples: Sequence[Question] = ()) -> str:
    """The prompt, without a space at its end: the space belongs to the choice."""
    shown = [f"{_asked(each)}{continuations_of(each)[each.answer]}" for each in examples]
    return "\n\n".join([*shown, _asked(question)])


def continuations_of(question: Question) -> list[str]:
    """What is scored for each choice."""
    if question.style is Style.LETTERS:
        return [f" {letter}" for letter in LETTERS[: len(question.choices)]]
    return [f" {choice.strip()}" for choice in question.choices]


def matched_choice(question: Question, text: str) -> int | None:
    """The choice that a generated text begins with: its letter, if listed, or its words."""
    line = text.strip().partition("\n")[0].strip()
    if question.style is Style.LETTERS and (found := re.match(r"\W*([A-Z])\b", line)):
        place = LETTERS.index(found[1])
        if place < len(question.choices):
            return place
    begun = [
        (len(choice), -place)
        for place, choice in enumerate(question.choices)
        if re.match(rf"{re.escape(choice.strip())}(?!\w)", line, re.IGNORECASE)
    ]
    return -max(begun)[1] if begun else None


def _asked(question: Question) -> str:
    lines = [question.passage.strip()] if question.passage.strip() else []
    if question.style is Style.SENTENCE:
        return "\n".join([*lines, question.text.strip()])
    lines.append(f"Question: {question.text.strip()}")
    if question.style is Style.LETTERS:
        pairs = zip(LETTERS, question.choices, strict=False)
        lines += [f"{letter}. {choice.strip()}" for letter, choice in pairs]
    return "\n".join([*lines, "Answer:"])
