"""How many requests and tokens a second, all prompts given at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import BenchOptions, release
from anabranch.bench.engine.fields import check_positive, option
from anabranch.bench.engine.prompts import Workload, random_workload
from anabranch.bench.engine.run_results import Record, RunResults, begin_results
from anabranch.bench.engine.transformers_peer import TransformersPeer

PEERS = ("transformers",)
ENGINE = "anabranch"


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """Random prompts, and answers of given lengths."""

    num_prompts: int = option(64, "How many prompts.")
    input_len: int = option(128, "Tokens of a prompt.")
    output_len: int = option(64, "Tokens of an answer.")
    range_ratio: float = option(
        0.0, "Lengths vary by this much: 0.5 draws from half to one and a half times."
    )
    max_num_seqs: int | None = option(None, "Sequences at once: 64 on a GPU, 16 on a CPU.")
    peer: str | None = option(None, "Run this on the same prompts, in the same run.", choices=PEERS)
    peer_attention: str = option(
        "sdpa", "Attention of the peer; several with commas: 'sdpa,anabranch'."
    )
    seed: int = option(0, "Of the prompts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_prompts", "input_len", "output_len", "max_num_seqs")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--range-ratio must be from 0 to below 1, got {self.range_ratio}")


def run_throughput(options: ThroughputOptions, progress: Progress) -> RunResults:
    """The engine's row, then a row for each way of the peer."""
    device = options.torch_device()
    results = begin_results("throughput", device, options)
    row, work, batch = _run_engine(options, progress)
    results.rows.append(row)
    release()
    if options.peer:
        for attention in options.peer_attention.split(","):
            results.rows.extend(_run_peer(options, work, batch, attention.strip(), progress))
    return results


def _run_engine(options: ThroughputOptions, progress: Progress) -> tuple[Record, Workload, int]:
    from anabranch.engine.sampling_params import SamplingParams

    most = round((options.input_len + options.output_len) * (1 + options.range_ratio)) + 2
    sizes = options.sized(most, options.max_num_seqs or 0) | {"max_num_seqs": options.max_num_seqs}
    llm = options.make(progress, **sizes)
    work = random_workload(
        options.num_prompts,
        options.input_len,
        options.output_len,
        llm.engine.vocab_size,
        range_ratio=options.range_ratio,
        seed=options.seed,
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for length in work.output_lens
    ]
    llm.generate(work.prompts[:2], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    total = work.num_output_tokens
    start = time.perf_counter()
    llm.generate(work.prompts, params, advance=lambda done: progress("generating", done, total))
    seconds = time.perf_counter() - start
    return throughput_row(ENGINE, work, seconds), work, llm.engine.limits.max_num_seqs


def _run_peer(
    options: ThroughputOptions, work: Workload, batch: int, attention: str, progress: Progress
) -> list[Record]:
    peer = TransformersPeer(options, attention, progress)
    warm = Workload(work.prompts[:2], [2, 2][: len(work.prompts)])
    rows: list[Record] = []
    try:
        progress(f"transformers generate, {attention}", 0, 0)
        peer.generate_seconds(warm, batch)
        seconds = peer.generate_seconds(work, batch)
        rows.append(throughput_row(f"transformers generate ({attention})", work, seconds))
        if peer.device.type == "cuda":
            progress(f"transformers continuous batching, {attention}", 0, 0)
            name = f"transformers generate_batch ({attention})"
            rows.append(_attempt(name, work, peer))
    finally:
        peer.close()
    return rows


def _attempt(name: str, work: Workload, peer: TransformersPeer) -> Record:
    try:
        return throughput_row(name, work, peer.continuous_seconds(work))
    except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def throughput_row(name: str, work: Workload, seconds: float) -> Record:
    """Rates of a run over a workload."""
    tokens = work.num_prompt_tokens + work.num_output_tokens
    return {
        "name": name,
        "seconds": seconds,
        "num_prompts": len(work.prompts),
        "num_prompt_tokens": work.num_prompt_tokens,
        "num_output_tokens": work.num_output_tokens,
        "requests_s": len(work.prompts) / seconds,
        "total_tokens_s": tokens / seconds,
        "output_tokens_s": work.num_output_tokens / seconds,
    }


def throughput_text(results: RunResults) -> str:
    """The line that people expect, for everyone who ran, and ratios to the engine's."""
    ours = results.rows[0]
    lines: list[str] = []
    for row in results.rows:
        if len(results.rows) > 1:
            lines.append(f"{row['name']}:")
        if "error" in row:
            lines.append(f"failed: {row['error']}")
            continue
        lines.append(
            f"Throughput: {row['requests_s']:.2f} requests/s, "
            f"{row['total_tokens_s']:.2f} total tokens/s, "
            f"{row['output_tokens_s']:.2f} output tokens/s"
        )
    for row in results.rows[1:]:
        if "error" not in row:
            ratio = ours["output_tokens_s"] / row["output_tokens_s"]
            lines.append(f"{ENGINE} is {ratio:.2f}x as fast as {row['name']}")
    return "\n".join([*lines, results.where])
