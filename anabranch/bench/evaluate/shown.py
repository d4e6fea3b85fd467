"""An evaluation as a table: a line for each subset, settings side by side."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.bench.evaluate.accuracy import Record
from anabranch.bench.evaluate.run import Evaluation
from anabranch.bench.table import Table

METRICS = ("acc", "acc_norm")


def eval_table(evaluation: Evaluation) -> Table:
    """Accuracies with their standard errors, and where two settings differ."""
    settings = list(dict.fromkeys(row["setting"] for row in evaluation.rows))
    metrics = [name for name in METRICS if name in evaluation.rows[0]]
    several = len(settings) > 1
    columns = [f"{name}, {each}" if several else name for name in metrics for each in settings]
    by_key = {(row["setting"], row["subset"]): row for row in evaluation.rows}
    subsets = list(dict.fromkeys(row["subset"] for row in evaluation.rows))
    differ = {row["subset"]: row for row in evaluation.differences}
    lines: list[list[str]] = []
    for subset in subsets:
        rows = [by_key[setting, subset] for setting in settings]
        cells = [_share(row, name) for name in metrics for row in rows]
        count, chance = str(rows[0]["num_questions"]), f"{rows[0]['chance']:.3f}"
        more = _difference(differ[subset]) if several else []
        lines.append([subset, count, chance, *cells, *more])
    return Table(
        title=f"accuracy of {_model(evaluation)}",
        columns=["subset", "questions", "chance", *columns, *_difference_names(differ)],
        lines=lines,
        notes=_notes(evaluation, metrics),
    )


def _share(row: Record, name: str) -> str:
    error = row[f"{name}_stderr"]
    return f"{row[name]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _difference_names(differ: dict[str, Record]) -> list[str]:
    if not differ:
        return []
    first = next(iter(differ.values()))
    return ["answers differ", "texts differ" if "texts_differ" in first else "largest difference"]


def _difference(row: Record) -> list[str]:
    if "texts_differ" in row:
        return [str(row["answers_differ"]), str(row["texts_differ"])]
    answers = f"{row['answers_differ']} / {row['norm_answers_differ']}"
    return [answers, f"{row['largest_difference']:.2g}"]


def _model(evaluation: Evaluation) -> str:
    if "base_url" in evaluation.options:
        return next(iter(evaluation.notes.values()))[0]
    return str(evaluation.options["model"])


def _notes(evaluation: Evaluation, metrics: Sequence[str]) -> list[str]:
    if len(metrics) == 2:
        notes = ["acc: the likeliest choice. acc_norm: the likeliest a byte. ± standard error."]
    else:
        unmatched = sum(row["num_unmatched"] for row in _whole(evaluation))
        asked = sum(row["num_questions"] for row in _whole(evaluation))
        notes = [
            "acc: the generated text begins with the right choice. ± standard error. "
            f"{unmatched} of {asked} texts begin with no choice."
        ]
    if evaluation.differences and len(metrics) == 2:
        notes.append("answers differ: acc / acc_norm. Largest difference: of log-likelihoods.")
    for setting, said in evaluation.notes.items():
        notes.append(f"{setting}: {'; '.join(said)}")
    return [*notes, f"{evaluation.header['device']}, {evaluation.header['commit']}"]


def _whole(evaluation: Evaluation) -> list[Record]:
    """The last row of every setting: its total, or its only subset."""
    last = {row["setting"]: row for row in evaluation.rows}
    return list(last.values())
