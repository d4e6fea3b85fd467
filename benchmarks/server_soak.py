"""A server under attack: fuzzed bodies, giant prompts, half-open connections, engines killed.

    python benchmarks/server_soak.py --minutes 10

For each of five tokenizer families, a server of a tiny model answers bystanders while others
attack it. No bystander's request may fail but those in flight when an engine is killed, every
half-open connection must be closed by the server, and its memory must return to within 10%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from fuzzed_bodies import fuzzed  # noqa: E402
from tokenizer_families import FAMILIES, WORDS, model_of  # noqa: E402

BYSTANDERS, FUZZERS = 6, 3
PARTIAL_HEADERS, PARTIAL_BODIES = 300, 100
GIANT_BYTES, GIANTS = 7 << 20, 8
GIANT_SECONDS = 10.0  # between volleys
OPEN_SECONDS = 5.0  # that the server waits for headers and bodies
KILL_SECONDS = 1.0  # after a kill in which requests count as in flight
NUM_KILLS = 2
SETTLE_SECONDS = 15.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b'Content-Length: 90\r\n\r\n{"prompt": "'
SERVE = """
import sys
from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.server.command import serve
from anabranch.llm.server.server_limits import ServerLimits
config = EngineConfig(
    model=sys.argv[1], device="cpu", max_num_seqs=8, kv_cache_gib=0.05,
    speculative=SpeculativeConfig(),
)
seconds = float(sys.argv[3])
limits = ServerLimits(header_seconds=seconds, body_seconds=seconds)
serve(config, port=int(sys.argv[2]), model_name="tiny", limits=limits, log_level="error")
"""


@dataclass
class Tally:
    """What was seen of one server."""

    answered: int = 0
    in_flight: int = 0  # failed, and open at a kill
    lost: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds of a bystander's request, kills apart
    fuzzed: Counter[int] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)  # answers to attackers that are no refusal
    kills: list[float] = field(default_factory=list)

    def at_a_kill(self, start: float, end: float) -> bool:
        """Whether a request was open at a kill."""
        return any(start <= kill + KILL_SECONDS and end >= kill for kill in self.kills)


class Victim:
    """A server in a process of its own."""

    def __init__(self, family: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = free.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        command = [sys.executable, "-c", SERVE, model_of(family), str(self.address[1])]
        self._process = subprocess.Popen([*command, str(OPEN_SECONDS)], cwd=ROOT)
        self._watched = psutil.Process(self._process.pid)

    async def until_healthy(self, client: httpx.AsyncClient) -> None:
        """Wait for the start or a restart."""
        while self._process.poll() is None:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit(f"the server ended with exit code {self._process.returncode}")

    def kill_engine(self) -> None:
        """As an operator without mercy would."""
        (engine,) = self._watched.children()
        engine.kill()

    def memory_mib(self) -> list[float]:
        """Resident memory of the server and of its engine."""
        processes = [self._watched, *self._watched.children()]
        return [process.memory_info().rss / (1 << 20) for process in processes]

    def close(self) -> int:
        """The exit code after SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(90)


async def bystand(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """Ask again and again for something that must be answered."""
    while True:
        start = time.monotonic()
        try:
            wrong = await ask(client, rng)
        except httpx.HTTPError as error:
            wrong = repr(error)
        end = time.monotonic()
        hit = tally.at_a_kill(start, end)
        if wrong is None:
            tally.answered += 1
        elif hit:
            tally.in_flight += 1
        else:
            tally.lost.append(wrong)
        if not hit:
            tally.slowest = max(tally.slowest, end - start)


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str | None:
    """What is wrong with an answer, if something is."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 40)))
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": True}
    body |= {"stream": rng.random() < 0.5, "temperature": rng.choice([0, 0.8, 1.5])}
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body |= {"prompt": text, "logprobs": rng.choice([None, 3])}
    answer = await client.post(path, json=body)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    if body["stream"]:
        return None if answer.text.endswith("data: [DONE]\n\n") else answer.text[-200:]
    used = answer.json()["usage"]["completion_tokens"]
    return None if used == body["max_tokens"] else f"{used} tokens of {body['max_tokens']}"


async def attack(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """Send bodies of any kind; an answer of 5xx without a kill is a fault."""
    while True:
        path, body = fuzzed(rng)
        await send_attack(client, tally, path, body)


async def send_attack(client: httpx.AsyncClient, tally: Tally, path: str, body: bytes) -> None:
    """One body, and what came of it."""
    start = time.monotonic()
    headers = {"content-type": "application/json"}
    try:
        answer = await client.post(path, content=body, headers=headers)
    except httpx.HTTPError as error:
        tally.broken.append(repr(error))
        return
    tally.fuzzed[answer.status_code] += 1
    if answer.status_code >= 500 and not tally.at_a_kill(start, time.monotonic()):
        tally.broken.append(f"{answer.text[:200]} to {body[:200]!r}")


async def send_giants(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """Volleys of prompts that are far too long."""
    while True:
        text = (" ".join(rng.choices(WORDS, k=1000)) * (GIANT_BYTES // 4000))[:GIANT_BYTES]
        kinds = [text, " " * GIANT_BYTES, "x" * GIANT_BYTES, [5] * (GIANT_BYTES // 3)]
        bodies = [json.dumps({"prompt": kinds[place % 4]}).encode() for place in range(GIANTS)]
        await asyncio.gather(
            *(send_attack(client, tally, "/v1/completions", body) for body in bodies)
        )
        await asyncio.sleep(GIANT_SECONDS)


def open_halves(address: tuple[str, int]) -> list[socket.socket]:
    """Connections that send a part of a request."""
    halves: list[socket.socket] = []
    for number in range(PARTIAL_HEADERS + PARTIAL_BODIES):
        halves.append(socket.create_connection(address, timeout=10))
        halves[-1].sendall(HEAD if number < PARTIAL_HEADERS else BODY)
    return halves


def count_open(halves: list[socket.socket]) -> int:
    """Those that the server has not closed."""
    num_open = 0
    for half in halves:
        half.setblocking(False)
        try:
            while half.recv(1 << 16):
                pass
        except BlockingIOError:
            num_open += 1
        except OSError:
            pass
        half.close()
    return num_open


async def soak(family: str, seconds: float, seed: int) -> dict[str, Any]:
    """One server, attacked."""
    victim, tally, rng = Victim(family), Tally(), random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=victim.url, timeout=120, limits=limits) as client:
        await victim.until_healthy(client)
        tasks = [asyncio.ensure_future(bystand(client, tally, rng)) for _ in range(BYSTANDERS)]
        await asyncio.sleep(seconds / 10)
        before = victim.memory_mib()
        halves = await asyncio.to_thread(open_halves, victim.address)
        tasks += [asyncio.ensure_future(attack(client, tally, rng)) for _ in range(FUZZERS)]
        tasks.append(asyncio.ensure_future(send_giants(client, tally, rng)))
        peak = await attacked(victim, tally, client, seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLE_SECONDS)
        after, restarts = victim.memory_mib(), (await client.get("/stats")).json()["restarts"]
    left = await asyncio.to_thread(count_open, halves)
    return {
        "family": family,
        "answered": tally.answered,
        "in flight at kills": tally.in_flight,
        "lost": tally.lost,
        "slowest bystander, s": round(tally.slowest, 2),
        "attacks by status": dict(sorted(tally.fuzzed.items())),
        "faults": tally.broken,
        "half-open left": left,
        "restarts": restarts,
        "server MiB before, peak, after": [round(before[0]), round(peak), round(after[0])],
        "engine MiB before, after": [round(before[1]), round(after[1])],
        "exit code": victim.close(),
    }


async def attacked(
    victim: Victim, tally: Tally, client: httpx.AsyncClient, seconds: float
) -> float:
    """Let it be attacked, and kill its engine now and then; the most memory of the server."""
    peak, start = 0.0, time.monotonic()
    kills = [seconds * (place + 1) / (NUM_KILLS + 1) for place in range(NUM_KILLS)]
    while (passed := time.monotonic() - start) < seconds:
        if kills and passed > kills[0]:
            kills.pop(0)
            await victim.until_healthy(client)
            tally.kills.append(time.monotonic())
            victim.kill_engine()
        peak = max(peak, victim.memory_mib()[0])
        await asyncio.sleep(0.2)
    await victim.until_healthy(client)
    return peak


def verdict(row: dict[str, Any]) -> list[str]:
    """What misses the bar."""
    misses = [name for name in ("lost", "faults", "half-open left") if row[name]]
    before, _, after = row["server MiB before, peak, after"]
    misses += ["server memory"] if after > 1.1 * before else []
    before, after = row["engine MiB before, after"]
    misses += ["engine memory"] if after > 1.1 * before else []
    misses += ["restarts"] if row["restarts"] != NUM_KILLS else []
    misses += ["exit code"] if row["exit code"] else []
    return misses


def main() -> int:
    """Soak every family, print a row for each; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all families together")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of tokenizers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    families, missed = options.families.split(","), False
    for family in families:
        seconds = 60 * options.minutes / len(families)
        row = asyncio.run(soak(family, seconds, options.seed))
        misses = verdict(row)
        missed |= bool(misses)
        print(json.dumps(row, ensure_ascii=False), "MISSED:" if misses else "ok", *misses)
        sys.stdout.flush()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
