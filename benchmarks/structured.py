"""What grammars cost: decode steps of one engine with none, half and all of a batch constrained.

    python benchmarks/structured.py                                   # SmolLM2, batch 16
    python benchmarks/structured.py --model dummy:llama-3.1-8b --batch 64   # on a GPU
    python benchmarks/structured.py --speculative ngram

Answers are long JSON arrays of objects: records with strings of a bounded length, texts without
bounds, and records with e-mail addresses, whose masks take longest. A model without a tokenizer
gets one with the words of --tokenizer, or SmolLM2's, and some with other endings up to its size.

Runs alternate; the medians of their steps are compared, and the means, and the time of cores: on a
busy machine it alone is a measure, with OMP_NUM_THREADS=1, since threads that wait for others count
as well. host_ms is what a step takes without waiting for the device, mask_ms the masks in it, and
model_ms the model on the device: masks cost nothing while a GPU has more to do than the host.
"""

from __future__ import annotations

import argparse
import json
import operator
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from rows import header, print_rows, save_rows

from anabranch import LLM, SamplingParams
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
}
TEXTS: dict[str, Any] = {"title": {"type": "string"}, "score": {"type": "number"}}
SCHEMAS = {
    "records": FIELDS,
    "texts": TEXTS,
    "addresses": FIELDS | {"mail": {"type": "string", "format": "email"}},
}
SHARES = (0.0, 0.5, 1.0)
STAGES = ("waiting", "masks", "model")  # of the engine


class StepTime(NamedTuple):
    """Seconds of a step."""

    wall: float
    cores: float
    host: float  # without waiting for the device
    masks: float
    model: float  # on the device


def array_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A schema of many objects."""
    required = {"required": [*fields], "additionalProperties": False}
    items = {"type": "object", "properties": fields, **required}
    return {"type": "array", "minItems": 4000, "items": items}


def lend_tokenizer(llm: LLM, source: Path | None) -> None:
    """Give a model of random weights a vocabulary of text, for its grammars only."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from anabranch.llm.models import smollm2_directory

    given = AutoTokenizer.from_pretrained(source or smollm2_directory()).get_vocab()
    size = llm.engine.vocab_size
    words = sorted(given, key=lambda word: given[word])[:size]
    draws, known = random.Random(0), set(words)
    stems, endings = words[300:], words[300:1000]
    while len(words) < size:
        pair = draws.choice(stems) + draws.choice(endings)
        if pair not in known:
            words.append(pair)
            known.add(pair)
    made = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=words[0])
    compiler = GrammarCompiler(tokenizer, size, [0])
    object.__setattr__(llm.engine.admission, "grammars", compiler)


def step_times(
    llm: LLM, schema: dict[str, Any], batch: int, share: float, tokens: int
) -> list[StepTime]:
    """Of each decode step of a batch, of which a share is constrained."""
    constrained = round(batch * share)
    common: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    engine, times = llm.engine, list[StepTime]()
    for place in range(batch):
        rules = {"structured_outputs": {"json": schema}} if place < constrained else {}
        prompt = [5 + place % 50, *range(10, 42)]
        params = SamplingParams(**common, **rules, seed=place)
        engine.add_request(f"{time.perf_counter()}-{place}", prompt, params)
    while engine.has_work:
        began, worked, stages = time.perf_counter(), time.process_time(), stage_seconds(llm)
        engine.step()
        wall, cores = time.perf_counter() - began, time.process_time() - worked
        waiting, masks, model = map(operator.sub, stage_seconds(llm), stages)
        times.append(StepTime(wall, cores, wall - waiting, masks, model))
    return times[4:-4]


def stage_seconds(llm: LLM) -> list[float]:
    """Of the stages so far."""
    sums = llm.stats.host_ms | llm.stats.stage_ms
    return [1e-3 * sums.get(name, 0.0) for name in STAGES]


def rows(args: argparse.Namespace) -> Any:
    """A row for each schema and share."""
    drafts = None if args.speculative == "off" else args.speculative
    llm = LLM(args.model, device=args.device, max_num_seqs=args.batch, speculative=drafts)
    if llm.tokenizer is None:
        lend_tokenizer(llm, args.tokenizer)
    for name, fields in SCHEMAS.items():
        for row in rows_of(llm, array_of(fields), args):
            yield {"model": args.model, "schema": name, **row}


def rows_of(llm: LLM, schema: dict[str, Any], args: argparse.Namespace) -> Any:
    """A row for each share."""
    for share in SHARES:
        step_times(llm, schema, args.batch, share, 16)  # warms up
    times: dict[float, list[StepTime]] = {share: [] for share in SHARES}
    for _ in range(args.rounds):
        for share in SHARES:
            times[share] += step_times(llm, schema, args.batch, share, args.tokens)
    graphs = llm.stats.num_graph_steps / llm.stats.num_steps
    free = columns(times[0.0])
    for share, found in times.items():
        taken = columns(found)
        yield {
            "batch": args.batch,
            "speculative": args.speculative,
            "constrained": share,
            "steps_by_graph": round(graphs, 3),
            "step_ms": ms(statistics.median(taken["wall"])),
            "step_ms_mean": ms(statistics.fmean(taken["wall"])),
            "step_ms_p99": ms(sorted(taken["wall"])[int(0.99 * len(taken["wall"]))]),
            "cost": cost(statistics.median, taken["wall"], free["wall"]),
            "cost_of_mean": cost(statistics.fmean, taken["wall"], free["wall"]),
            "host_ms": ms(statistics.median(taken["host"])),
            "mask_ms": ms(statistics.median(taken["masks"])),
            "mask_ms_mean": ms(statistics.fmean(taken["masks"])),
            "model_ms": ms(statistics.median(taken["model"])),
            "core_ms": ms(statistics.fmean(taken["cores"])),
            "cost_of_cores": cost(statistics.fmean, taken["cores"], free["cores"]),
        }


def columns(times: list[StepTime]) -> dict[str, list[float]]:
    """Each kind of time, of all steps."""
    return {name: [getattr(each, name) for each in times] for name in StepTime._fields}


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def cost(middle: Callable[[list[float]], float], times: list[float], free: list[float]) -> float:
    """How much more than without grammars."""
    return round(middle(times) / middle(free) - 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer", type=Path, help="a directory; for models without one")
    parser.add_argument("--device", default=None)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speculative", default="off")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = print_rows(rows(args))
    timing = {"timing": "steps of an engine by the wall clock, milliseconds"}
    save_rows(args.out, header() | timing, found)
    worst = max(float(str(row["cost"])) for row in found)
    print(json.dumps({"cost of grammars": worst}))


if __name__ == "__main__":
    main()
