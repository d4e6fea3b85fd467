"""Requests and tokens a second, with all prompts given at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from anabranch.llm.bench.bench_options import ThroughputOptions
from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.transformers_peer import TransformersPeer
from anabranch.llm.bench.workload import Workload, greedy, random_workload, release_memory
from anabranch.llm.cli.progress import Progress


def run_throughput(options: ThroughputOptions, progress: Progress) -> RunResults:
    """A row of the engine, then a row for each method of the peer."""
    results = begin_results("throughput", options.torch_device(), options)
    row, work, batch = _run_engine(options, progress)
    results.rows.append(row)
    release_memory()
    if options.peer:
        for attention in options.peer_attention.split(","):
            results.rows.extend(_run_peer(options, work, batch, attention.strip(), progress))
            release_memory()
    return results


def _run_engine(options: ThroughputOptions, progress: Progress) -> tuple[Record, Workload, int]:
    most = round((options.input_len + options.output_len) * (1 + options.range_ratio)) + 2
    llm = options.make(progress, **options.sized(most, options.max_num_seqs))
    work = random_workload(
        options.num_prompts,
        options.input_len,
        options.output_len,
        llm.engine.vocab_size,
        range_ratio=options.range_ratio,
        seed=options.seed,
    )
    llm.generate(work.prompts[:2], greedy(2))
    params, total = list(map(greedy, work.output_lens)), sum(work.output_lens)
    start = time.perf_counter()
    llm.generate(work.prompts, params, advance=lambda done: progress("generating", done, total))
    seconds = time.perf_counter() - start
    return throughput_row("anabranch", work, seconds), work, llm.engine.limits.max_num_seqs


def _run_peer(
    options: ThroughputOptions, work: Workload, batch: int, attention: str, progress: Progress
) -> list[Record]:
    peer = TransformersPeer(options, attention, progress)
    peer.generate_seconds(Workload(work.prompts[:2], [2, 2]), batch)
    ways: dict[str, Callable[[], float]] = {"generate": lambda: peer.generate_seconds(work, batch)}
    if peer.device.type == "cuda":
        ways["generate_batch"] = lambda: peer.continuous_seconds(work)
    rows: list[Record] = []
    for way, measure in ways.items():
        name = f"transformers {way} ({attention})"
        progress(name, 0, 0)
        try:
            rows.append(throughput_row(name, work, measure()))
        except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"name": name, "error": reason})
    return rows


def throughput_row(name: str, work: Workload, seconds: float) -> Record:
    num_prompt_tokens, num_output_tokens = sum(map(len, work.prompts)), sum(work.output_lens)
    return {
        "name": name,
        "seconds": seconds,
        "num_prompts": len(work.prompts),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "requests_s": len(work.prompts) / seconds,
        "total_tokens_s": (num_prompt_tokens + num_output_tokens) / seconds,
        "output_tokens_s": num_output_tokens / seconds,
    }


def throughput_text(results: RunResults) -> str:
    """One line for each implementation, and the ratios of the engine to the others."""
    rate = results.rows[0]["output_tokens_s"]
    lines: list[str] = []
    for row in results.rows:
        lines += [f"{row['name']}:"] if len(results.rows) > 1 else []
        if "error" in row:
            lines.append(f"failed: {row['error']}")
            continue
        lines.append(
            f"Throughput: {row['requests_s']:.2f} requests/s, "
            f"{row['total_tokens_s']:.2f} total tokens/s, "
            f"{row['output_tokens_s']:.2f} output tokens/s"
        )
        if row is not results.rows[0]:
            lines.append(f"anabranch is {rate / row['output_tokens_s']:.2f}x as fast")
    return "\n".join([*lines, results.where])
