"""The tasks that come with a package: their files, how they ask, and how a line is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from anabranch.bench.evaluate.questions import LETTERS, Question, Style

if TYPE_CHECKING:
    from anabranch.bench.evaluate.packaged_data import Progress

MEDICAL = (
    "Anaesthesia",
    "Anatomy",
    "Biochemistry",
    "Dental",
    "ENT",
    "Forensic_Medicine",
    "Gynaecology_Obstetrics",
    "Medicine",
    "Microbiology",
    "Ophthalmology",
    "Orthopaedics",
    "Pathology",
    "Pediatrics",
    "Pharmacology",
    "Physiology",
    "Psychiatry",
    "Radiology",
    "Skin",
    "Social_Preventive_Medicine",
    "Surgery",
)


@dataclass(frozen=True, slots=True)
class Task:
    """Subsets by name, each a file, and how it is asked: as in lm-eval, with one exception.

    lm-eval asks CommonsenseQA by letters. Those are chance to small models: on 200 questions
    SmolLM2-135M has 0.175 by letters and 0.25 by text.
    """

    subsets: dict[str, str]
    style: Style


TASKS = {
    "piqa": Task({"piqa": "PIQA/validation.jsonl"}, Style.TEXT),
    "commonsenseqa": Task({"commonsenseqa": "CommonsenseQA/validation.jsonl"}, Style.TEXT),
    "openbookqa": Task({"openbookqa": "OpenBookQA/test.jsonl"}, Style.SENTENCE),
    "boolq": Task({"boolq": "BoolQ/dev.jsonl"}, Style.TEXT),
    "siqa": Task({"siqa": "SIQA/test.jsonl"}, Style.TEXT),
    "mmlu": Task(
        {"mmlu": "MMLU/test.jsonl", "mmlu/clinical": "MMLU/clinical.jsonl"}, Style.LETTERS
    ),
    "medmcqa": Task(
        {f"medmcqa/{name}": f"MedMCQA/MedMCQA-Validation/{name}.jsonl" for name in MEDICAL},
        Style.LETTERS,
    ),
}
FILES = tuple(file for task in TASKS.values() for file in task.subsets.values())


def load_task(name: str, progress: Progress | None = None) -> list[Question]:
    """All questions of a task that have an answer."""
    if name not in TASKS:
        raise ValueError(f"--tasks must be among {', '.join(TASKS)}, got {name!r}")
    from anabranch.bench.evaluate.packaged_data import packaged_files

    task, files = TASKS[name], packaged_files(FILES, progress)
    return [
        question
        for subset, file in task.subsets.items()
        for question in parse_lines(files[file], subset, task.style)
    ]


def parse_lines(content: str, subset: str, style: Style) -> Iterator[Question]:
    """Questions of a file of the package; lines whose answer is not among the options are not."""
    for line in content.split("\n"):
        if not line.strip():
            continue
        record = json.loads(line)
        if "options" not in record:
            yield _yes_or_no(record, subset)
        elif (answer := _place(record)) is not None:
            choices = split_options(record["options"])
            passage = record.get("passage", "")
            yield Question(record["question"], choices, answer, subset, passage, style)


def split_options(listed: str) -> tuple[str, ...]:
    """Of "A. first\\nB. second"; a choice may have several lines."""
    choices: list[str] = []
    rest = "\n" + listed.strip("\n")
    for letter, following in pairwise(LETTERS):
        if not rest.startswith(f"\n{letter}. "):
            return ()
        end = rest.find(f"\n{following}. ")
        choices.append(rest[4 : None if end < 0 else end].strip())
        if end < 0:
            break
        rest = rest[end:]
    return tuple(choices)


def _place(record: dict[str, Any]) -> int | None:
    """Of the answer "B. second", if letter and text agree with the options."""
    choices = split_options(record["options"])
    if len(choices) < 2 or not all(choices):
        return None
    found = re.match(r"([A-Z])\. ", record.get("answer", ""))
    place = LETTERS.index(found[1]) if found else len(choices)
    agrees = place < len(choices) and record["answer"][3:].strip() == choices[place]
    return place if agrees else None


def _yes_or_no(record: dict[str, Any], subset: str) -> Question:
    passage = f"{record['title']} -- {record['passage']}"
    text = f"{record['question'].rstrip('?')}?"
    return Question(text, ("no", "yes"), int(record["answer"] == "True"), subset, passage)
