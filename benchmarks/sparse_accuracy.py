"""How much sparse decoding changes the next token: a model on this repository's own documents.

    python benchmarks/sparse_accuracy.py [--model smollm2] [--context 4096] [--out FILE]

The text is in the cache, computed densely. At each of some positions one token is run, by a decode
step that reads all keys or `keep` of them, and the probabilities of what follows are compared:
perplexity of the text's own next token, and how often the most likely token is the same.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from anabranch import LLM, SamplingParams
from anabranch.llm.bench.run_results import begin_results
from anabranch.llm.bench.workload import release_memory

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("DESIGN.md", "README.md", "docs/attend.md", "docs/tuning.md", "docs/schedule.md")
PAGE = 16
METHODS = ("pages", "recent")


@dataclass
class Options:
    """What is run."""

    model: str
    context: int
    positions: int
    keep: str
    out: Path | None


class Next(NamedTuple):
    """What a model says about the token after a prefix."""

    best: int
    logprob: float  # of the token that the text has


def look_ahead(llm: LLM, ids: list[int], lengths: list[int]) -> list[Next]:
    """One step of one token for each prefix, whose other tokens are in the cache."""
    vocab = llm.engine.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=vocab, ignore_eos=True)
    found: list[Next] = []
    for length in lengths:
        output = llm.generate([ids[:length]], params)[0].outputs[0]
        entry = (output.logprobs or [])[0]
        found.append(Next(output.token_ids[0], entry[ids[length]].logprob))
    return found


def measure(options: Options, sparse: dict[str, object] | None) -> list[Next]:
    """All positions under one setting."""
    llm = LLM(
        options.model, max_model_len=options.context + 2, max_num_seqs=1, page_size=PAGE,
        sparse=sparse,
    )  # fmt: skip
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    ids: list[int] = llm.tokenizer(text)["input_ids"][: options.context + 1]
    if len(ids) <= options.context:
        raise ValueError(f"the text has {len(ids)} tokens, context is {options.context}")
    llm.generate([ids[: options.context]], SamplingParams(temperature=0.0, max_tokens=1))
    # One token after a page: all others are found in the cache.
    last = (options.context - 1) // PAGE
    places = torch.linspace(last // 2, last, options.positions).long().unique().tolist()
    found = look_ahead(llm, ids, [place * PAGE + 1 for place in places])
    del llm
    release_memory()
    return found


def row_of(name: str, keep: int, found: list[Next], dense: list[Next]) -> dict[str, object]:
    same = sum(a.best == b.best for a, b in zip(found, dense, strict=True))
    return {
        "method": name,
        "keep": keep,
        "positions": len(found),
        "same_token": same / len(found),
        "perplexity": math.exp(-sum(each.logprob for each in found) / len(found)),
    }


def main(options: Options) -> None:
    """Print a table, and write JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = begin_results("sparse_accuracy", device, options)
    dense = measure(options, None)
    results.rows.append(row_of("dense", options.context, dense, dense))
    for keep in map(int, options.keep.split(",")):
        for method in METHODS:
            found = measure(options, {"method": method, "keep": keep})
            results.rows.append(row_of(method, keep, found, dense))
    for row in results.rows:
        print(
            "{method:8} {keep:6} {same_token:7.1%} same, perplexity {perplexity:.3f}".format(**row)
        )
    print(results.where)
    if options.out:
        results.save(options.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=128, help="between half and all of it")
    parser.add_argument("--keep", default="256,512,1024,2048")
    parser.add_argument("--out", type=Path)
    main(Options(**vars(parser.parse_args())))
