"""`anabranch bench soak`: many clients for minutes, some of which vanish in the middle."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from anabranch.bench.engine.bars import Progress, progress_bars
from anabranch.bench.engine.run_results import Record, RunResults, begin_results
from anabranch.bench.serve.api import Api, fields_of
from anabranch.bench.serve.ask import ask
from anabranch.bench.serve.http_client import parse_site
from anabranch.bench.serve.launch import OwnServer, running
from anabranch.bench.serve.memory import memory_mib
from anabranch.bench.serve.soak_options import SoakOptions
from anabranch.bench.serve.soak_row import Tally, soak_row, soak_table
from anabranch.bench.serve.words import WORDS
from anabranch.bench.table import print_table

HELP = (
    "Serve a model and keep many clients busy with it; some vanish in the middle of an answer. "
    "All others must be answered, and no page may stay in use.\n\n"
    "    anabranch bench soak --out soak.json\n"
    "    anabranch bench soak --clients 8 --seconds 10\n"
)
HEALTH_SECONDS = 0.05  # between two looks at /health
SAMPLE_SECONDS = 1.0  # between two looks at memory and pages
SETTLE_SECONDS = 30.0  # for pages to be freed once all clients are gone


def run_soak(options: SoakOptions, progress: Progress) -> RunResults:
    """One row."""
    results = begin_results("soak", options.torch_device(), options)
    progress("starting a server", 0, 0)
    with running(options.server_settings(), {}) as server:
        results.rows.append(asyncio.run(soak(options, server, progress)))
    return results


async def soak(options: SoakOptions, server: OwnServer, progress: Progress) -> Record:
    """Load a server, look at it meanwhile and afterwards."""
    api, tally = Api(parse_site(server.url), options.timeout), Tally()
    model = await api.first_model()
    first = await ask(api, "completions", _body(options, model, random.Random(options.seed)))
    if first.failure is not None:
        raise ValueError(f"the server fails to answer: {first.failure.kind}: {first.failure.said}")
    start = time.perf_counter()
    watch = [_watch_health(api, tally), _watch_size(api, server.pid, tally)]
    watchers = [asyncio.ensure_future(each) for each in watch]
    clients = [_client(options, api, model, number, tally) for number in range(options.clients)]
    showing = asyncio.ensure_future(_show(options, progress))
    await asyncio.gather(*clients)
    seconds = time.perf_counter() - start
    for task in (*watchers, showing):
        task.cancel()
    await asyncio.gather(*watchers, showing, return_exceptions=True)
    end = await _settled(api)
    return soak_row(tally, seconds) | {
        "kv_usage_end": end["cache_usage"],
        "running_end": end["running"],
        "waiting_end": end["waiting"],
        "preemptions": end["preemptions"],
        "memory_mib_end": memory_mib(server.pid),
    }


async def _client(options: SoakOptions, api: Api, model: str, number: int, tally: Tally) -> None:
    rng = random.Random(options.seed * 1_000_003 + number)
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end:
        body = _body(options, model, rng)
        leaves = rng.random() < options.vanish
        after = rng.randint(1, max(options.output_len // 2, 1)) if leaves else None
        outcome = await ask(api, "completions", body, leave_after=after)
        if outcome.left:
            tally.vanished += 1
        else:
            tally.answered.append(outcome)


def _body(options: SoakOptions, model: str, rng: random.Random) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": " ".join(rng.choices(WORDS, k=options.input_words)),
        "max_tokens": options.output_len,
        "ignore_eos": True,
        "temperature": 0.8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _watch_health(api: Api, tally: Tally) -> None:
    while True:
        start = time.perf_counter()
        healthy = await api.get("/health") is not None
        tally.health.append(time.perf_counter() - start)
        tally.unhealthy += not healthy
        await asyncio.sleep(HEALTH_SECONDS)


async def _watch_size(api: Api, pid: int, tally: Tally) -> None:
    while True:
        tally.usage.append(fields_of(await api.get("/stats")).get("cache_usage", 0.0))
        if (size := memory_mib(pid)) is not None:
            tally.memory.append((time.perf_counter(), size))
        await asyncio.sleep(SAMPLE_SECONDS)


async def _show(options: SoakOptions, progress: Progress) -> None:
    start = time.perf_counter()
    while True:
        passed = min(int(time.perf_counter() - start), int(options.seconds))
        progress(f"{options.clients} clients, seconds", passed, max(int(options.seconds), 1))
        await asyncio.sleep(SAMPLE_SECONDS)


async def _settled(api: Api) -> Record:
    """The server's counts once nothing runs, or when that has taken too long."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        counts = fields_of(await api.get("/stats"))
        if not counts:
            raise ValueError("the server does not answer /stats any more")
        busy = counts["running"] or counts["waiting"] or counts["cache_usage"]
        if not busy or time.monotonic() > end:
            return counts
        await asyncio.sleep(0.2)


def run_and_show(options: SoakOptions) -> None:
    """Run, print, and write what was asked for."""
    with progress_bars() as progress:
        results = run_soak(options, progress)
    if options.out:
        results.save(options.out)
    print_table(soak_table(results))
    if options.out:
        print(f"written to {options.out}")
