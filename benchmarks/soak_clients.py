"""Clients of a soaked server: bystanders who must be answered, and attackers of every kind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from fuzzed_bodies import fuzzed
from soak_tally import Tally
from tokenizer_families import WORDS

BYSTANDER = str(Path(__file__).parent / "soak_bystander.py")
GIANT_BYTES, GIANTS = 7 << 20, 8
GIANT_SECONDS = 10.0  # between volleys
PARTIAL_HEADERS, PARTIAL_BODIES = 300, 100
LONG_TOKENS = 900
SLOW_BYTES, SLOW_SECONDS = 4096, 0.2  # a slow reader's sips
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = HEAD + b'Content-Length: 90\r\n\r\n{"prompt": "'
PROMPT = [(place * 7 + place * place) % 12 + 4 for place in range(900)]  # tokens of every family
NEVER = [f"{place:x}~zq{'y' * 20}" for place in range(256)]  # as many stop strings as are taken
# The status to expect, and a body; the smallest vocabulary has 17 tokens.
ATTACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "stops": (200, {"prompt": "hello", "max_tokens": 40, "n": 4, "stop": NEVER}),
    "too many stops": (400, {"prompt": "hello", "stop": [f"{i:x}~zq~" for i in range(200_000)]}),
    "prompt logprobs": (200, {"prompt": PROMPT, "max_tokens": 1, "n": 8, "prompt_logprobs": 16}),
    "echoes": (200, {"prompt": PROMPT, "max_tokens": 2, "n": 4, "echo": True, "logprobs": 16}),
    "too many echoes": (400, {"prompt": PROMPT, "n": 64, "echo": True, "logprobs": 16}),
}


async def ask_two_tokens(url: str, tally: Tally) -> None:
    """A bystander whose waiting is measured, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, BYSTANDER, url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        while line := await process.stdout.readline():
            start, end, wrong = json.loads(line)
            tally.count(wrong, start, end)
            tally.asked.append((start, end))
    finally:
        process.kill()
        await process.wait()


async def bystand(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """Ask again and again for something that must be answered."""
    while True:
        start = time.monotonic()
        try:
            wrong = await ask(client, rng)
        except httpx.HTTPError as error:
            wrong = repr(error)
        tally.count(wrong, start, time.monotonic())


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
    """Send bodies of any kind; an answer of 5xx without an outage is a fault."""
    while True:
        path, body = fuzzed(rng)
        await send_attack(client, tally, "fuzz", path, body)


async def overload(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """What is costly and allowed, and what is a little more than that."""
    while True:
        kind = rng.choice(list(ATTACKS))
        expected, body = ATTACKS[kind]
        encoded = await asyncio.to_thread(json.dumps, body | {"ignore_eos": True})
        await send_attack(client, tally, kind, "/v1/completions", encoded.encode(), expected)
        await asyncio.sleep(rng.random())


async def send_attack(
    client: httpx.AsyncClient,
    tally: Tally,
    kind: str,
    path: str,
    body: bytes,
    expected: int | None = None,
) -> None:
    """One body, and what came of it."""
    start = time.monotonic()
    headers = {"content-type": "application/json"}
    try:
        answer = await client.post(path, content=body, headers=headers)
        status, text = answer.status_code, answer.text
    except httpx.HTTPError as error:
        status, text = 599, repr(error)
    tally.attacks[f"{kind}: {status}"] += 1
    is_wrong = status >= 500 if expected is None else status != expected
    if is_wrong and not tally.in_flight_at(start, time.monotonic()):
        tally.broken.append(f"{kind}: {text[:200]} to {body[:200]!r}")


async def send_giants(client: httpx.AsyncClient, tally: Tally, rng: random.Random) -> None:
    """Volleys of prompts that are far too long."""
    while True:
        text = (" ".join(rng.choices(WORDS, k=1000)) * (GIANT_BYTES // 4000))[:GIANT_BYTES]
        kinds = [text, " " * GIANT_BYTES, "x" * GIANT_BYTES, [5] * (GIANT_BYTES // 3)]
        bodies = [json.dumps({"prompt": kinds[place % 4]}).encode() for place in range(GIANTS)]
        sends = (send_attack(client, tally, "giant", "/v1/completions", body) for body in bodies)
        await asyncio.gather(*sends)
        await asyncio.sleep(GIANT_SECONDS)


async def read_long(address: tuple[str, int], tally: Tally, *, slowly: bool) -> None:
    """Read long streamed answers, as fast as they come or in sips."""
    fields = {"prompt": "hello", "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    request = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body
    while True:
        start, last = time.monotonic(), b""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(connection, address)
            await loop.sock_sendall(connection, request)
            while more := await loop.sock_recv(connection, SLOW_BYTES):
                last = (last + more)[-200:]
                await asyncio.sleep(SLOW_SECONDS if slowly else 0)
        except OSError as error:
            last = repr(error).encode()
        finally:
            connection.close()
        if b"data: [DONE]" in last:
            tally.read += 1
        elif not tally.in_flight_at(start, time.monotonic()):
            tally.lost.append(f"reader: {last[-200:]!r}")
        await asyncio.sleep(0.05)


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
