"""Many requests at given times, and the figures of their outcomes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from anabranch.llm.bench.run_results import Record
from anabranch.llm.bench.serve.load_options import Load
from anabranch.llm.bench.serve.streamed_request import Outcome

Send = Callable[[dict[str, Any]], Awaitable[Outcome]]


class LoadRun(NamedTuple):
    """Outcomes in the order of their requests, and how long it took to get them all."""

    outcomes: list[Outcome]
    start: float
    seconds: float


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start: a Poisson process, or all at once."""
    if rate is None:
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist() if count else []


async def run_load(
    send: Send,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    *,
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """Send all requests; a request waits for its time, then for a place among those under way."""
    places = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    start, done = time.perf_counter(), 0

    async def send_when_due(body: dict[str, Any], due: float) -> Outcome:
        nonlocal done
        await asyncio.sleep(max(start + due - time.perf_counter(), 0.0))
        async with places:
            outcome = await send(body)
        done += 1
        advance(done)
        return outcome

    times = arrival_times(len(bodies), load.rate, seed)
    outcomes = await asyncio.gather(*map(send_when_due, bodies, times))
    return LoadRun(outcomes, start, time.perf_counter() - start)


def summarise(run: LoadRun, load: Load) -> Record:
    """A row: counts, rates, and latencies in milliseconds, of the requests that succeeded."""
    good = [outcome for outcome in run.outcomes if outcome.failure is None]
    num_input = sum(outcome.num_input for outcome in good)
    num_output = sum(outcome.num_output for outcome in good)
    tpots = [tpot for outcome in good if (tpot := outcome.tpot) is not None]
    return {
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "max_concurrency": load.concurrency,
        "request_rate": load.rate,
        "duration": run.seconds,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "cached_input_tokens": sum(outcome.num_cached for outcome in good),
        "request_throughput": len(good) / run.seconds,
        "output_throughput": num_output / run.seconds,
        "max_output_tokens_per_s": peak_tokens(good, run.start, run.seconds),
        "max_concurrent_requests": peak_concurrency(run.outcomes),
        "total_token_throughput": (num_input + num_output) / run.seconds,
        **latencies("ttft", [outcome.ttft for outcome in good]),
        **latencies("tpot", tpots),
        **latencies("itl", [itl for outcome in good for itl in outcome.itls]),
        **latencies("e2el", [outcome.latency for outcome in good]),
        "failures": count_failures(run.outcomes),
    }


def latencies(name: str, seconds: Sequence[float]) -> Record:
    """Mean, median and 99th percentile, interpolated; None of nothing."""
    figures: tuple[float | None, ...] = (None, None, None)
    if seconds:
        middle, high = np.percentile(seconds, (50, 99)).tolist()
        figures = (1e3 * mean(seconds), 1e3 * middle, 1e3 * high)
    names = (f"{which}_{name}_ms" for which in ("mean", "median", "p99"))
    return dict(zip(names, figures, strict=True))


def peak_tokens(outcomes: Sequence[Outcome], start: float, seconds: float) -> float:
    """Most tokens in a second of the run; those of a request are shared out over its chunks.

    A run of less than a second has no peak but its mean.
    """
    buckets = np.zeros(int(seconds) + 1)
    for outcome in outcomes:
        share = outcome.num_output / len(outcome.arrivals)
        for arrival in outcome.arrivals:
            buckets[min(max(int(arrival - start), 0), len(buckets) - 1)] += share
    return float(max(buckets.max(), buckets.sum() / seconds))


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests under way at one moment."""
    begun = [(outcome.start, 1) for outcome in outcomes]
    ended = [(outcome.end, -1) for outcome in outcomes]
    return max(accumulate(change for _, change in sorted(begun + ended)), default=0)


def count_failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and the message of the first."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    counts = Counter(failure.kind for failure in failures)
    messages = {failure.kind: failure.message for failure in reversed(failures)}
    return {kind: {"count": count, "said": messages[kind]} for kind, count in counts.items()}
