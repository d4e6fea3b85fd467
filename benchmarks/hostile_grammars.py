"""64 clients, half with grammars, some of them hostile: what the others feel.

    python benchmarks/hostile_grammars.py --seconds 60
    python benchmarks/hostile_grammars.py --out benchmarks/results/structured/cpu-hostile.json

A server of SmolLM2, or of --model, answers 32 streams without grammars and 32 with. Then eight of
the latter send huge schemas, regexes that blow up, deep nesting, multiples of large numbers and
ambiguous grammars, as fast as they are refused. The gaps between tokens of the 32 plain streams
are compared, and nothing may die: the server is healthy at the end, its engine the same, and a
grammar is answered. client_ms_max is the longest that the client itself was away, health_ms_max the
longest answer to /health, for which the server's event loop alone is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from rows import header, save_rows

from anabranch.llm.bench.serve.serve_bench import launched
from anabranch.llm.cli.engine_options import ServingOptions

PLAIN, CONSTRAINED, HOSTILE = 32, 32, 8
PROBE_SECONDS = 0.05
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 8},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def nested(depth: int) -> Any:
    """A schema of objects in objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def attacks() -> list[dict[str, Any]]:
    """Fields of bodies that cost their server much."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}
    options = [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(6) for i in range(1)]
    return [
        {"guided_regex": "((a{1000}){1000})"},
        {"guided_regex": "(.*a.{20}|.*b.{25}|.*c.{30}){3}"},
        {"guided_regex": "(a+)+" * 200},
        {"guided_regex": "(" * 5000 + ")" * 5000},
        {"guided_json": wide},
        {"guided_json": nested(50)},
        {"guided_json": nested(150)},
        {"guided_json": {"allOf": [{"anyOf": options} for _ in range(10)]}},
        {"guided_json": {"enum": [f"value {i} {'x' * 9}" for i in range(5000)]}},
        {"guided_json": {"type": "integer", "multipleOf": 3000017}},
        {"guided_json": {"type": "integer", "multipleOf": 99991}},
        {"guided_json": {"allOf": [{"pattern": f".*a.{{{i}}}"} for i in range(20)]}},
        {"guided_regex": "(.*a.{12}|.*b.{12}|.*c.{12})*"},
        {"guided_grammar": 'start: a a a a a a\na: a a | (b b)* | "x"\nb: a | "x" | "y" b | b "z"'},
        {"guided_grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(9000))},
        {"guided_choice": [f"{i}" * 20 for i in range(4000)]},
        {"structured_outputs": {"json": {}, "whitespace_pattern": "(.*a.{30}){5}"}},
    ]


async def stream(client: httpx.AsyncClient, body: dict[str, Any], gaps: list[float]) -> int:
    """Follow one stream; its status."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        last = None
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
        return answer.status_code


async def repeat(
    client: httpx.AsyncClient, end: float, make: Any, gaps: list[float], seen: Counter[int]
) -> None:
    """Send one request after the other until the end."""
    while time.monotonic() < end:
        try:
            seen[await stream(client, make(), gaps)] += 1
        except httpx.HTTPError:
            seen[0] += 1


async def lags(client: httpx.AsyncClient, end: float) -> tuple[float, float]:
    """The longest that this client, and that the server's event loop, did not answer."""
    own, servers = [0.0], [0.0]
    while time.monotonic() < end:
        began = time.perf_counter()
        await asyncio.sleep(PROBE_SECONDS)
        woken = time.perf_counter()
        await client.get("/health")
        own.append(woken - began - PROBE_SECONDS)
        servers.append(time.perf_counter() - woken)
    return max(own), max(servers)


async def phase(url: str, seconds: float, hostile: int) -> dict[str, Any]:
    """All clients for some seconds; what the plain ones and the others saw."""
    draw, bad = random.Random(0), attacks()
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    common = {"messages": messages, "stream": True, "max_tokens": 64}
    counts = {name: Counter[int]() for name in ("plain", "constrained", "hostile")}
    gaps: list[float] = []
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as c:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        work = [
            repeat(c, end, lambda: common | {"ignore_eos": True}, gaps, counts["plain"])
            for _ in range(PLAIN)
        ]
        work += [
            repeat(c, end, lambda: common | {"response_format": form}, [], counts["constrained"])
            for _ in range(CONSTRAINED - hostile)
        ]
        work += [
            repeat(c, end, lambda: common | draw.choice(bad), [], counts["hostile"])
            for _ in range(hostile)
        ]
        (own, servers), *_ = await asyncio.gather(lags(c, end), *work)
    gaps.sort()
    return {
        "attackers": hostile,
        "tokens": len(gaps),
        "itl_ms_median": round(1e3 * gaps[len(gaps) // 2], 1),
        "itl_ms_p99": round(1e3 * gaps[int(0.99 * len(gaps))], 1),
        "itl_ms_max": round(1e3 * gaps[-1], 1),
        "client_ms_max": round(1e3 * own, 1),
        "health_ms_max": round(1e3 * servers, 1),
        **{name: dict(found) for name, found in counts.items()},
    }


def main() -> None:
    """Both phases, then whether the server lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default=None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = ServingOptions(device=args.device, max_num_seqs=64)
    with launched(args.model, options, timeout=600) as server:
        engines = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        rows = list[dict[str, Any]]()
        for hostile in (0, HOSTILE):
            rows.append(asyncio.run(phase(server.url, args.seconds, hostile)))
            print(json.dumps(rows[-1]), flush=True)
        children = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
        health = httpx.get(f"{server.url}/health", trust_env=False).status_code
        body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "[ab]{3}"}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=body, timeout=300, trust_env=False
        )
        said = answer.json()["choices"][0]["message"]["content"]
        memory = psutil.Process(max(engines)).memory_info().rss >> 20
    ratio = rows[1]["itl_ms_p99"] / rows[0]["itl_ms_p99"]
    end = {"health": health, "same engine": engines <= children, "answer": said}
    rows.append(end | {"engine MiB": memory, "p99 / p99 before": round(ratio, 2)})
    print(json.dumps(rows[-1]))
    timing = {"timing": "gaps between tokens of plain streams at the client, milliseconds"}
    save_rows(args.out, header() | timing | {"model": args.model}, rows)


if __name__ == "__main__":
    main()
