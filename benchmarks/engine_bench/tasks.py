"""Prompts in words: questions, and a text to summarise."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

RIVER = Path(__file__).parents[2] / "examples" / "river.txt"
TEXTS = Path(__file__).parent / "texts"
SUMMARISE = "Please summarise the following text."


def summary_messages(file: Path | None = None, task: str = SUMMARISE) -> list[dict[str, str]]:
    """A request for a summary of a file: the answer copies words, which n-grams find."""
    path = file or RIVER
    if not path.is_file():
        raise FileNotFoundError(f"no text to summarise at {path}; give one with --file")
    return [{"role": "user", "content": f"{task}\n\n{path.read_text().strip()}"}]


def question_messages(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one question each."""
    questions = islice(cycle((TEXTS / "questions.txt").read_text().splitlines()), count)
    return [[{"role": "user", "content": question}] for question in questions]
