"""`anabranch bench soak`: many clients for minutes, some of which disconnect mid-stream."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.serve.endpoint import Endpoint, as_dict
from anabranch.llm.bench.serve.load_options import Load
from anabranch.llm.bench.serve.request_bodies import COMMON_WORDS, streamed_body
from anabranch.llm.bench.serve.request_load import LoadRun, latencies, summarise
from anabranch.llm.bench.serve.serve_bench import LaunchedServer, launched
from anabranch.llm.bench.serve.streamed_request import Outcome, check_answer, send_request
from anabranch.llm.bench.table import Table
from anabranch.llm.cli.progress import Progress
from engine_bench.source_options import SoakOptions

HEALTH_SECONDS = 0.05  # between two requests to /health
SAMPLE_SECONDS = 1.0  # between two readings of memory and pages
SETTLE_SECONDS = 30.0  # for pages to be freed once all clients are gone


@dataclass(slots=True)
class Tally:
    """What was seen so far."""

    answered: list[Outcome] = field(default_factory=list[Outcome])  # or failed
    vanished: int = 0
    health: list[float] = field(default_factory=list[float])  # seconds
    unhealthy: int = 0
    memory: list[float] = field(default_factory=list[float])  # MiB
    usage: list[float] = field(default_factory=list[float])


def run_soak(options: SoakOptions, progress: Progress) -> RunResults:
    results = begin_results("soak", options.torch_device(), options)
    progress("starting a server", 0, 0)
    with launched(options.model, options, options.timeout) as server:
        results.rows.append(asyncio.run(soak(options, server, progress)))
    return results


async def soak(options: SoakOptions, server: LaunchedServer, progress: Progress) -> Record:
    """Load a server, and observe it meanwhile and afterwards."""
    endpoint, tally = Endpoint(server.url, timeout=options.timeout), Tally()
    model = await endpoint.first_model()
    words = " ".join(COMMON_WORDS[: options.input_words])
    check_answer(await send_request(endpoint, "completions", _body(options, model, words)))
    start = time.perf_counter()
    watching = asyncio.gather(
        _watch_health(endpoint, tally), _watch_size(options, endpoint, server.pid, tally, progress)
    )
    clients = (_client(options, endpoint, model, i, tally) for i in range(options.clients))
    await asyncio.gather(*clients)
    seconds = time.perf_counter() - start
    watching.cancel()
    end = await _settled(endpoint)
    return soak_row(tally, start, seconds, options.clients) | {
        "kv_usage_end": end["cache_usage"],
        "running_end": end["running"],
        "waiting_end": end["waiting"],
        "preemptions": end["preemptions"],
        "memory_mib_end": memory_mib(server.pid),
    }


async def _client(
    options: SoakOptions, endpoint: Endpoint, model: str, number: int, tally: Tally
) -> None:
    rng = random.Random(options.seed * 1_000_003 + number)
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        words = " ".join(rng.choices(COMMON_WORDS, k=options.input_words))
        vanishes = rng.random() < options.vanish
        after = rng.randint(1, max(options.output_len // 2, 1)) if vanishes else None
        outcome = await send_request(
            endpoint, "completions", _body(options, model, words), disconnect_after=after
        )
        if outcome.disconnected:
            tally.vanished += 1
        else:
            tally.answered.append(outcome)


def _body(options: SoakOptions, model: str, prompt: str) -> dict[str, Any]:
    body = streamed_body(model, options.output_len, temperature=0.8, ignore_eos=True)
    return body | {"prompt": prompt}


async def _watch_health(endpoint: Endpoint, tally: Tally) -> None:
    while True:
        start = time.perf_counter()
        healthy = await endpoint.get("/health") is not None
        tally.health.append(time.perf_counter() - start)
        tally.unhealthy += not healthy
        await asyncio.sleep(HEALTH_SECONDS)


async def _watch_size(
    options: SoakOptions, endpoint: Endpoint, pid: int, tally: Tally, progress: Progress
) -> None:
    start, total = time.perf_counter(), max(int(options.seconds), 1)
    while True:
        passed = min(int(time.perf_counter() - start), total)
        progress(f"{options.clients} clients, seconds", passed, total)
        tally.usage.append(as_dict(await endpoint.get("/stats")).get("cache_usage", 0.0))
        tally.memory.append(memory_mib(pid))
        await asyncio.sleep(SAMPLE_SECONDS)


async def _settled(endpoint: Endpoint) -> Record:
    """The server's counts once nothing runs, or when that has taken too long."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        counts = as_dict(await endpoint.get("/stats"))
        if not counts:
            raise ValueError("the server does not answer /stats any more")
        busy = counts["running"] or counts["waiting"] or counts["cache_usage"]
        if not busy or time.monotonic() > end:
            return counts
        await asyncio.sleep(0.2)


def memory_mib(pid: int) -> float:
    """Resident MiB of a process and those it started."""
    process = psutil.Process(pid)
    family = (process, *process.children(recursive=True))
    return sum(each.memory_info().rss for each in family) / (1 << 20)


def soak_row(tally: Tally, start: float, seconds: float, clients: int) -> Record:
    """Counts, rates and, in milliseconds, latencies."""
    half = len(tally.memory) // 2
    return summarise(LoadRun(tally.answered, start, seconds), Load(clients, None)) | {
        "vanished": tally.vanished,
        "health_requests": len(tally.health),
        "unhealthy": tally.unhealthy,
        **latencies("health", tally.health),
        "max_health_ms": 1e3 * max(tally.health, default=0.0),
        "kv_usage_peak": max(tally.usage, default=0.0),
        "memory_mib_early": max(tally.memory[:half], default=None),
        "memory_mib_late": max(tally.memory[half:], default=None),
    }


def soak_table(results: RunResults) -> Table:
    """The row, one figure a line."""
    (row,) = results.rows
    lines = [
        [name.replace("_", " "), f"{value:.2f}" if isinstance(value, float) else str(value)]
        for name, value in row.items()
    ]
    return Table(f"soak, {results.where}", ["", ""], lines, [])
