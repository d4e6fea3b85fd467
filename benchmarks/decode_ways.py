"""Decode steps of one engine in two ways: shared pages read once, or a part of long contexts.

    python benchmarks/decode_ways.py cascade [--model M] [--batch 64] [--shared 8192] [--out FILE]
    python benchmarks/decode_ways.py sparse [--batch 8] [--own 32768] [--keep 2048] [--out FILE]

Prompts are in the cache before the clock runs. Rounds of both ways take turns, in one engine with
graphs for both. Answers are counted that are the same: all with cascades, in float32; with sparse
decoding, few.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from anabranch import LLM, SamplingParams
from anabranch.llm.bench.latency import full_batch_ms
from anabranch.llm.bench.run_results import begin_results
from anabranch.llm.bench.workload import random_prompts
from anabranch.llm.cli.step_times import record_steps


@dataclass
class Options:
    """What is run."""

    way: str
    model: str
    batch: int | None
    shared: int | None
    own: int | None
    keep: int
    method: str
    output_len: int
    rounds: int
    dtype: str | None
    compile: bool | None
    out: Path | None

    def __post_init__(self) -> None:
        """The sizes of each way, unless given."""
        sizes = {"cascade": (64, 8192, 32), "sparse": (8, 0, 32768)}[self.way]
        given = (self.batch, self.shared, self.own)
        chosen = (b if a is None else a for a, b in zip(given, sizes, strict=True))
        self.batch, self.shared, self.own = chosen


def measure(llm: LLM, prompts: list[list[int]], options: Options) -> tuple[float, list[list[int]]]:
    """Milliseconds of a step in which all sequences decode, and the tokens of all."""
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    stats = record_steps(llm)
    answers = llm.generate(prompts, params)
    return median(full_batch_ms(answers, stats)), [x.outputs[0].token_ids for x in answers]


def build(options: Options, device: torch.device) -> LLM:
    """An engine that can do both."""
    length = (options.shared or 0) + (options.own or 0) + options.output_len + 1
    shares = options.way == "cascade"
    return LLM(
        options.model,
        dtype=options.dtype,
        compile=options.compile,
        max_num_seqs=options.batch,
        max_model_len=length,
        cascade=(None if device.type == "cuda" else True) if shares else False,
        sparse=None if shares else {"method": options.method, "keep": options.keep},
    )


def main(options: Options) -> None:
    """Print a line for each way, and write JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = begin_results("decode_ways", device, options)
    begin = time.perf_counter()
    llm = build(options, device)
    print(f"the engine started in {time.perf_counter() - begin:.1f} s", flush=True)
    choice = llm.engine.choice.prefixes or llm.engine.choice.sparse
    if choice is None:
        raise ValueError(f"{options.model} has too few keys for {options.way} to pay")
    vocab, (batch, shared, own) = (
        llm.engine.vocab_size,
        (options.batch, options.shared, options.own),
    )
    common = random_prompts(1, shared, vocab, seed=1)[0] if shared else []
    prompts = [common + each for each in random_prompts(batch or 1, own or 1, vocab, seed=2)]
    once = SamplingParams(temperature=0.0, max_tokens=1)
    llm.generate(prompts[:1], once)
    llm.generate(prompts, once)
    taken: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, list[list[int]]] = {}
    for i in range(options.rounds + 1):
        for on in taken:
            choice.enabled = on
            ms, tokens[on] = measure(llm, prompts, options)
            taken[on] += [ms] if i else []
    off = median(taken[False])
    for on, name in ((False, "off"), (True, "on")):
        ms = median(taken[on])
        results.rows.append(
            {"name": f"{options.way} {name}", "ms_a_step": ms, "samples": taken[on]}
        )
        print(f"{options.way} {name}: {ms:.3f} ms a step, {off / ms:.2f}x")
    same = sum(a == b for a, b in zip(tokens[False], tokens[True], strict=True))
    print(f"answers that are equal: {same} of {batch}; {results.where}")
    if options.out:
        results.save(options.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("cascade", "sparse"))
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--shared", type=int)
    parser.add_argument("--own", type=int)
    parser.add_argument("--keep", type=int, default=2048)
    parser.add_argument("--method", default="pages")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--out", type=Path)
    main(Options(**vars(parser.parse_args())))
