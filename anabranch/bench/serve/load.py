"""Many requests: when each is sent, and how many are under way at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from anabranch.bench.serve.options import Load
from anabranch.bench.serve.outcome import Outcome

Ask = Callable[[dict[str, Any]], Awaitable[Outcome]]


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
    ask: Ask,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    *,
    seed: int = 0,
    advance: Callable[[int], None] = lambda done: None,
) -> LoadRun:
    """Send all requests; a request waits for its time, then for a place among those under way."""
    places = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    start, done = time.perf_counter(), 0

    async def send(body: dict[str, Any], due: float) -> Outcome:
        nonlocal done
        await asyncio.sleep(max(start + due - time.perf_counter(), 0.0))
        async with places:
            outcome = await ask(body)
        done += 1
        advance(done)
        return outcome

    times = arrival_times(len(bodies), load.rate, seed)
    outcomes = await asyncio.gather(*map(send, bodies, times))
    return LoadRun(outcomes, start, time.perf_counter() - start)
