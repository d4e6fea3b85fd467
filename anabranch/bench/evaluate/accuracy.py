"""Shares of right answers with their standard errors, and how two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from anabranch.bench.evaluate.answers import Answer
from anabranch.bench.evaluate.questions import Question

TOTAL = "total"
Record = dict[str, Any]


def accuracy_rows(
    setting: str, questions: Sequence[Question], answers: Sequence[Answer]
) -> list[Record]:
    """A row for each subset and, where there are several, one for all questions."""
    pairs = list(zip(questions, answers, strict=True))
    subsets = list(dict.fromkeys(question.subset for question in questions))
    rows = [_row(setting, name, [p for p in pairs if p[0].subset == name]) for name in subsets]
    return [*rows, _row(setting, TOTAL, pairs)] if len(rows) > 1 else rows


def share_right(right: Sequence[bool]) -> tuple[float, float | None]:
    """The share, and its standard error: that of a mean, from the sample's own variance."""
    share = sum(right) / len(right)
    error = sqrt(share * (1 - share) / (len(right) - 1)) if len(right) > 1 else None
    return share, error


def difference_rows(
    questions: Sequence[Question], first: Sequence[Answer], second: Sequence[Answer]
) -> list[Record]:
    """How many answers of two runs differ, subset by subset."""
    triples = list(zip(questions, first, second, strict=True))
    subsets = list(dict.fromkeys(question.subset for question in questions))
    rows = [_differences(name, [t for t in triples if t[0].subset == name]) for name in subsets]
    return [*rows, _differences(TOTAL, triples)] if len(rows) > 1 else rows


def _row(setting: str, subset: str, pairs: Sequence[tuple[Question, Answer]]) -> Record:
    acc, error = share_right([answer.choice == question.answer for question, answer in pairs])
    row: Record = {
        "setting": setting,
        "subset": subset,
        "num_questions": len(pairs),
        "chance": sum(1 / len(question.choices) for question, _ in pairs) / len(pairs),
        "acc": acc,
        "acc_stderr": error,
    }
    if pairs[0][1].text is not None:
        return row | {"num_unmatched": sum(answer.choice is None for _, answer in pairs)}
    norm, error = share_right([answer.normalised == question.answer for question, answer in pairs])
    return row | {"acc_norm": norm, "acc_norm_stderr": error}


def _differences(subset: str, triples: Sequence[tuple[Question, Answer, Answer]]) -> Record:
    pairs = [(first, second) for _, first, second in triples]
    row: Record = {
        "subset": subset,
        "num_questions": len(pairs),
        "answers_differ": sum(a.choice != b.choice for a, b in pairs),
    }
    if pairs[0][0].text is None:
        gaps = [
            abs(x - y)
            for a, b in pairs
            for x, y in zip(a.loglikelihoods, b.loglikelihoods, strict=True)
        ]
        norm = sum(a.normalised != b.normalised for a, b in pairs)
        return row | {"norm_answers_differ": norm, "largest_difference": max(gaps)}
    return row | {"texts_differ": sum(_said(a) != _said(b) for a, b in pairs)}


def _said(answer: Answer) -> object:
    """Tokens where they are known: different ones may spell the same text."""
    return answer.token_ids if answer.token_ids is not None else answer.text
