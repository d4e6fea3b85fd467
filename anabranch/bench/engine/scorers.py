"""One step of the model, measured alone: verification by either scorer, and plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import SCORERS, BenchOptions
from anabranch.bench.engine.fields import check_positive, option
from anabranch.bench.engine.prompts import random_prompts
from anabranch.bench.engine.run_results import Record, RunResults, begin_results
from anabranch.bench.table import Table, format_number
from anabranch.bench.timing import event_us

if TYPE_CHECKING:
    from anabranch.engine.build import Built
    from anabranch.engine.scheduler import Scheduled
    from anabranch.engine.sequence import Sequence

PLAIN = "plain decode step"


@dataclass(frozen=True, kw_only=True)
class ScorersOptions(BenchOptions):
    """A batch of sequences, each with drafts to score."""

    batch: int = option(8, "Sequences.")
    context: int = option(512, "Keys of each sequence.")
    repeats: int = option(10, "Times to measure; the median is shown.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "batch", "context", "repeats", "num_drafts")


def run_scorers(options: ScorersOptions, progress: Progress) -> RunResults:
    """A row for a plain decode step and one for each scorer, over the same keys."""
    results = begin_results("scorers", options.torch_device(), options)
    bench = StepBench(options, progress)
    results.rows.append(bench.measure(PLAIN, SCORERS[0], 0, progress))
    for scorer in SCORERS:
        results.rows.append(bench.measure(scorer, scorer, options.num_drafts, progress))
    return results


class StepBench:
    """A model whose cache holds sequences of random tokens, ready for one more step."""

    def __init__(self, options: ScorersOptions, progress: Progress) -> None:
        from anabranch.engine.build import build
        from anabranch.engine.config import EngineConfig, SpeculativeConfig
        from anabranch.engine.layout import Scorer

        speculative = SpeculativeConfig(
            num_drafts=options.num_drafts, scorer=Scorer.BATCH_EXPANSION
        )  # the scorer that needs the larger buffers
        length = options.context + options.num_drafts + 1
        config: dict[str, Any] = options.engine_config() | {
            "speculative": speculative,
            "cuda_graphs": False,  # captured below, for the shapes in question
            "max_num_seqs": options.batch,
            "max_model_len": options.max_model_len or length,
        }
        self._options = options
        self._built = build(EngineConfig(model=options.model, **config), progress)
        self._seqs = make_sequences(self._built, options.batch, options.context, options.num_drafts)
        self._prefill(progress)

    @torch.inference_mode()
    def _prefill(self, progress: Progress) -> None:
        """Compute the keys of all sequences in steps that the engine could take."""
        from anabranch.engine.scheduler import Scheduled

        chunk = self._built.limits.max_num_tokens
        for place, seq in enumerate(self._seqs):
            progress("filling the cache", place, len(self._seqs))
            for start in range(0, self._options.context, chunk):
                count = min(chunk, self._options.context - start)
                last = start + count == self._options.context
                self._built.runner.run([Scheduled(seq, start, count, samples=last)])

    def measure(self, name: str, scorer: str, num_drafts: int, progress: Progress) -> Record:
        """Milliseconds of a step, with a captured graph on a GPU, and called from Python."""
        from anabranch.engine.graphs import GraphKey, Graphs
        from anabranch.engine.layout import Scorer

        progress(f"measuring {name}", 0, 0)
        runner = self._built.runner
        runner.scorer, runner.graphs = Scorer(scorer), Graphs()
        step = self._step(num_drafts)
        row: Record = {"name": name, "tokens_a_sequence": 1 + num_drafts}
        repeats = self._options.repeats
        on_gpu = self._built.device.type == "cuda"
        eager = _median_ms(lambda: runner.run(step), repeats, on_gpu)
        if not on_gpu or not self._options.graphs:
            return row | {"ms": eager, "eager_ms": eager}
        key = GraphKey(1 + num_drafts, self._options.batch)
        runner.capture([key])
        runner.run(step)  # loads the buffers that the graph reads
        return row | {
            "ms": _median_ms(lambda: runner.graphs.replay(key), repeats, on_gpu),
            "eager_ms": eager,
        }

    def _step(self, num_drafts: int) -> list[Scheduled]:
        from anabranch.engine.scheduler import Scheduled

        start = self._options.context
        return [Scheduled(seq, start, 1 + num_drafts, num_drafts) for seq in self._seqs]


def make_sequences(built: Built, batch: int, context: int, num_drafts: int) -> list[Sequence]:
    """Sequences with pages for `context` tokens, one that follows them, and drafts."""
    from anabranch.cache.page_pool import PagePool
    from anabranch.cache.sequence_pages import SequencePages
    from anabranch.engine.build import vocab_size
    from anabranch.engine.sampling_params import SamplingParams
    from anabranch.engine.sequence import Sequence

    pool = PagePool(built.limits.num_pages)
    length = context + 1 + num_drafts
    seqs: list[Sequence] = []
    for row, tokens in enumerate(random_prompts(batch, length, vocab_size(built.target))):
        pages = SequencePages(pool, built.limits.page_size)
        if not pages.grow(length):
            raise ValueError(
                f"{batch} sequences of {length} tokens do not fit into "
                f"{built.limits.num_pages} pages of {built.limits.page_size}"
            )
        seqs.append(
            Sequence(
                request_id=str(row),
                index=0,
                params=SamplingParams(),
                prompt_len=context,
                tokens=tokens[: context + 1],
                pages=pages,
                seed=row,
                max_tokens=1,
                row=row,
                drafts=tokens[context + 1 :],
                num_drafts=num_drafts,
            )
        )
    return seqs


def _median_ms(call: Callable[[], Any], repeats: int, on_gpu: bool) -> float:
    for _ in range(2):
        call()
    if on_gpu:
        return median(event_us([call] * repeats)) / 1e3
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def scorers_table(results: RunResults) -> Table:
    """Milliseconds of a step, and how many plain steps that is."""
    plain = results.rows[0]["ms"]
    lines = [
        [
            row["name"],
            str(row["tokens_a_sequence"]),
            format_number(row["ms"]),
            format_number(row["eager_ms"]),
            f"{row['ms'] / plain:.2f}x",
        ]
        for row in results.rows
    ]
    by_name = {row["name"]: row["ms"] for row in results.rows}
    ratio = by_name[SCORERS[1]] / by_name[SCORERS[0]]
    notes = [f"{SCORERS[0]} is {ratio:.2f}x as fast as {SCORERS[1]}", results.where]
    title = (
        f"one step of {results.options['model']}: {results.options['batch']} sequences, "
        f"{results.options['context']} keys each"
    )
    columns = ["step", "tokens a sequence", "ms", "ms from Python", "to plain"]
    return Table(title, columns, lines, notes)
