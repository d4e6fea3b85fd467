"""An evaluation from its options to its results."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.bench.ceilings import Ceilings
from anabranch.bench.engine.bars import Progress, progress_bars
from anabranch.bench.evaluate.accuracy import Record, accuracy_rows, difference_rows
from anabranch.bench.evaluate.answers import Answer, answer_by_likelihood, answer_in_words
from anabranch.bench.evaluate.asked import Asked, gather
from anabranch.bench.evaluate.backend import Backend
from anabranch.bench.evaluate.endpoint import EndpointBackend
from anabranch.bench.evaluate.in_process import EngineBackend
from anabranch.bench.evaluate.options import EvalOptions, variants
from anabranch.bench.evaluate.questions import Question
from anabranch.bench.results import make_header

UNMEASURED = Ceilings(0.0, 0.0)


class Evaluation(NamedTuple):
    """What was found, and on what."""

    header: Record
    options: Record
    rows: list[Record]  # a setting and a subset
    differences: list[Record]  # between the two settings of a comparison, by subset
    notes: dict[str, list[str]]  # by setting

    def save(self, path: Path) -> None:
        """Write JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.json() + "\n")

    def json(self) -> str:
        """All of it."""
        return json.dumps(self._asdict(), indent=1, default=str)


def evaluate(options: EvalOptions, progress: Progress) -> Evaluation:
    """Ask the questions under every setting."""
    asked = gather(options, progress)
    found: dict[str, list[Answer]] = {}
    notes: dict[str, list[str]] = {}
    for setting, variant in variants(options):
        found[setting], notes[setting] = _answered(setting, variant, asked, progress)
    runs = list(found.values())
    if options.samples:
        _write_samples(options.samples, asked.questions, found)
    return Evaluation(
        _header(options),
        {k: v for k, v in vars(options).items() if v is not None and k != "api_key"},
        [row for name, run in found.items() for row in accuracy_rows(name, asked.questions, run)],
        difference_rows(asked.questions, *runs) if len(runs) == 2 else [],
        notes,
    )


def _answered(
    setting: str, options: EvalOptions, asked: Asked, progress: Progress
) -> tuple[list[Answer], list[str]]:
    def advance(done: int, of: int) -> None:
        progress(f"asking, {setting}", done, of)

    backend = _backend(options, progress)
    try:
        if options.mode == "generate":
            answers = answer_in_words(backend, *asked, options.max_tokens, advance)
        else:
            answers = answer_by_likelihood(backend, *asked, advance)
        return answers, backend.notes
    finally:
        backend.close()


def _backend(options: EvalOptions, progress: Progress) -> Backend:
    if options.base_url is None:
        return EngineBackend(options.make(progress))
    return EndpointBackend(
        options.base_url,
        model=options.served_model,
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY"),
        concurrency=options.concurrency,
    )


def _header(options: EvalOptions) -> Record:
    header = asdict(make_header("eval", options.torch_device(), UNMEASURED))
    del header["ceilings"]
    if options.base_url is not None:
        header["device"] = "an endpoint"
    return header


def _write_samples(
    path: Path, questions: Sequence[Question], found: dict[str, list[Answer]]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for place, question in enumerate(questions):
            line: dict[str, Any] = asdict(question) | {"style": question.style.value}
            line["answers"] = {name: asdict(run[place]) for name, run in found.items()}
            file.write(json.dumps(line) + "\n")


def run_eval(options: EvalOptions) -> None:
    """Evaluate, print, and write what was asked for."""
    from anabranch.bench.evaluate.shown import eval_table
    from anabranch.bench.table import print_table

    if options.base_url is None:
        from anabranch.bench.engine.benches import quiet_transformers

        quiet_transformers()
    with progress_bars() as progress:
        evaluation = evaluate(options, progress)
    if options.out:
        evaluation.save(options.out)
    if options.json:
        print(evaluation.json())
        return
    print_table(eval_table(evaluation))
    for path in (options.out, options.samples):
        if path:
            print(f"written to {path}")
