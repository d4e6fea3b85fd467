"""A server under attack, beside bystanders who must not notice.

    python benchmarks/server_soak.py --minutes 10 --out FILE

For each of five tokenizer families a server of a tiny model is attacked by fuzzed bodies, giant
prompts, half-open connections, slow readers, stop strings and logprobs, while its engine is killed
once and stopped once. Before that, sixteen slow readers are compared with sixteen fast ones; after
it, one of two ranks is killed, and threads share an `LLM`. Bars: no request lost but those in
flight when an engine was found dead, 99% of a bystander's two tokens within a second, threads, open
files and memory as before. What other processes of the machine took meanwhile is in every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import soak_clients as clients  # noqa: E402
from soak_load import OthersLoad  # noqa: E402
from soak_tally import Outage, Tally, percentile  # noqa: E402
from soaked_server import SoakedServer  # noqa: E402
from tokenizer_families import FAMILIES, model_of  # noqa: E402

BYSTANDERS, FUZZERS, OVERLOADERS, SLOW_READERS = 3, 2, 2, 4
READERS = 16  # of the comparison of slow with fast ones
SETTLE_SECONDS = 15.0
MOST_SECONDS = 1.0  # 99% of a bystander's two tokens
READER_SHARE, RANK_SHARE, THREAD_SHARE = 0.06, 0.05, 0.05  # of the whole time


@asynccontextmanager
async def serving(
    family: str, *, ranks: int = 1
) -> AsyncGenerator[tuple[SoakedServer, httpx.AsyncClient]]:
    """A server that is healthy, and its client."""
    server = SoakedServer(family, ranks=ranks)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        try:
            await server.until_healthy(client)
            yield server, client
        except BaseException:
            server.kill()
            raise


@asynccontextmanager
async def running(*calls: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Clients, until it is left. One that fails by itself fails the soak."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        yield
    finally:
        failed = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in failed:
            task.result()


async def outage(
    server: SoakedServer, client: httpx.AsyncClient, tally: Tally, harm: Callable[[], None]
) -> None:
    """Harm an engine, and wait until another one answers."""
    tally.outages.append(Outage(time.monotonic()))
    harm()
    await server.until_healthy(client, False)
    tally.outages[-1].noticed = time.monotonic()
    await server.until_healthy(client)
    tally.outages[-1].end = time.monotonic()


async def soak_family(family: str, seconds: float, seed: int) -> dict[str, Any]:
    """One server, attacked by everything."""
    rng, tally = random.Random(seed), Tally()
    async with serving(family) as (server, client):
        calls = lambda: [  # noqa: E731
            clients.ask_two_tokens(server.url, tally),
            clients.send_giants(client, tally, rng),
            *(clients.bystand(client, tally, rng) for _ in range(BYSTANDERS)),
            *(clients.attack(client, tally, rng) for _ in range(FUZZERS)),
            *(clients.overload(client, tally, rng) for _ in range(OVERLOADERS)),
            *(clients.read_long(server.address, tally, slowly=True) for _ in range(SLOW_READERS)),
        ]
        await warm_up(client)
        async with running(*calls()):
            await asyncio.sleep(seconds / 4)
        await asyncio.sleep(SETTLE_SECONDS)
        before = server.held()
        halves = await asyncio.to_thread(clients.open_halves, server.address)
        start = time.monotonic()
        async with running(*calls()):
            for share, harm in ((1 / 4, server.kill_engine), (1 / 2, server.stop_engine)):
                await asyncio.sleep(max(start + share * seconds - time.monotonic(), 0))
                await outage(server, client, tally, harm)
            await asyncio.sleep(max(start + seconds * 3 / 4 - time.monotonic(), 0))
        await asyncio.sleep(SETTLE_SECONDS)
        after, restarts = server.held(), (await client.get("/stats")).json()["restarts"]
        left = await asyncio.to_thread(clients.count_open, halves)
    row = {"phase": "attacks", "family": family, **summary(tally), "half-open left": left}
    return row | {
        "restarts": restarts,
        "before": before,
        "after": after,
        "exit code": server.close(),
        "missed": misses(tally, left, before, after) + (["restarts"] if restarts != 2 else []),
    }


async def warm_up(client: httpx.AsyncClient) -> None:
    """Fill the pools of threads, so that they do not count as leaks."""
    tokens = {"tokens": [5] * 900}
    await asyncio.gather(*(client.post("/detokenize", json=tokens) for _ in range(64)))
    texts = [{"prompt": "a" * size} for size in (10, 10, 10, 10, 70_000)]
    await asyncio.gather(*(client.post("/tokenize", json=text) for text in texts))


def summary(tally: Tally) -> dict[str, Any]:
    return {
        "answered": tally.answered,
        "in flight at outages": tally.in_flight,
        "lost": tally.lost[:10],
        "two tokens, s": {
            "count": len(tally.two_tokens),
            **{f"p{percent}": percentile(tally.two_tokens, percent) for percent in (50, 99, 100)},
            "p99 with outages": percentile([end - start for start, end in tally.asked], 99),
        },
        "attacks": dict(sorted(tally.attacks.items())),
        "faults": tally.broken[:10],
        "long answers read": tally.read,
        "outages, s": [round(each.end - each.begin, 1) for each in tally.outages],
    }


def misses(tally: Tally, left: int, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missed = ["lost"] * bool(tally.lost) + ["faults"] * bool(tally.broken)
    missed += ["half-open"] * bool(left)
    missed += ["two tokens"] * ((percentile(tally.two_tokens, 99) or 9e9) > MOST_SECONDS)
    missed += [name for name in ("threads", "files") if after[name] > before[name]]
    return missed + [name for name in ("MiB", "engine MiB") if after[name] > 1.1 * before[name]]


async def compare_readers(seconds: float) -> dict[str, Any]:
    """A bystander beside readers of long answers: none, fast ones, slow ones."""
    row: dict[str, Any] = {"phase": "readers", "missed": []}
    async with serving("byte-level") as (server, client):
        for kind, number in (("none", 0), ("fast", READERS), ("slow", READERS)):
            tally = Tally()
            readers = [
                clients.read_long(server.address, tally, slowly=kind == "slow")
                for _ in range(number)
            ]
            before = (await client.get("/stats")).json()["output_tokens"]
            async with running(*readers, clients.ask_two_tokens(server.url, tally)):
                await asyncio.sleep(seconds)
                tokens = (await client.get("/stats")).json()["output_tokens"] - before
            row[kind] = summary(tally) | {"tokens a second": round(tokens / seconds)}
            row["missed"] += ["lost"] * bool(tally.lost)
            await asyncio.sleep(1.0)
    fast, slow = (row[kind]["two tokens, s"]["p99"] for kind in ("fast", "slow"))
    if slow is None or fast is None:
        row["missed"].append("too short to compare")
    else:
        row["slow / fast, p99"] = round(slow / fast, 2)
        row["missed"] += ["two tokens"] * (slow > MOST_SECONDS)
    return row | {"exit code": server.close()}


async def lose_a_rank(seconds: float) -> dict[str, Any]:
    """Two ranks, one of which is killed."""
    tally, rng = Tally(), random.Random(0)
    async with serving("byte-level", ranks=2) as (server, client):
        async with running(*(clients.bystand(client, tally, rng) for _ in range(BYSTANDERS))):
            await asyncio.sleep(seconds / 2)
            await outage(server, client, tally, server.kill_rank)
            await asyncio.sleep(seconds / 2)
        row = {"phase": "ranks", **summary(tally), "missed": ["lost"] * bool(tally.lost)}
    return row | {"exit code": server.close()}


def share_an_llm(seconds: float) -> dict[str, Any]:
    """In a process of its own, which memory that is written twice would end."""
    command = [sys.executable, str(ROOT / "benchmarks" / "llm_threads.py"), model_of("byte-level")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(seconds)], env=environment, capture_output=True, text=True, check=False
    )
    say = done.stdout.strip() or done.stderr[-300:]
    missed = ["threads on an LLM"] * bool(done.returncode)
    return {"phase": "threads", "calls": say, "exit code": done.returncode, "missed": missed}


def main() -> int:
    """Print a row for each phase; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all phases together")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of tokenizers")
    parser.add_argument("--phases", default="readers,attacks,ranks,threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    options = parser.parse_args()
    seconds, families = 60 * options.minutes, options.families.split(",")
    attacked = seconds * (1 - 3 * READER_SHARE - RANK_SHARE - THREAD_SHARE) / len(families)
    phases: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "readers": [lambda: asyncio.run(compare_readers(READER_SHARE * seconds))],
        "attacks": [
            lambda family=family: asyncio.run(soak_family(family, attacked, options.seed))
            for family in families
        ],
        "ranks": [lambda: asyncio.run(lose_a_rank(RANK_SHARE * seconds))],
        "threads": [lambda: share_an_llm(THREAD_SHARE * seconds)],
    }
    rows: list[dict[str, Any]] = []
    for phase in options.phases.split(","):
        for run in phases[phase]:
            load = OthersLoad()
            rows.append(run() | {"cores taken by others": load.cores()})
            missed = rows[-1]["missed"] + ["exit code"] * bool(rows[-1]["exit code"])
            rows[-1]["missed"] = missed
            print(json.dumps(rows[-1], ensure_ascii=False), "MISSED:" if missed else "ok", *missed)
            sys.stdout.flush()
    if options.out:
        save(options, rows)
    return int(any(row["missed"] for row in rows))


def save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """With the commit, the machine and the versions."""
    import torch

    from anabranch.llm.bench.run_results import begin_results

    results = begin_results("server soak", torch.device("cpu"), options)
    results.rows.extend(rows)
    results.save(options.out)


if __name__ == "__main__":
    sys.exit(main())
