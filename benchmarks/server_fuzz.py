"""Requests that schemathesis makes of the server's OpenAPI document; none may get a 5xx.

    python benchmarks/server_fuzz.py --cases 100000

The application runs in this process, before an engine that answers with arbitrary tokens: a case
costs what it takes to make it. Half of the bodies are right by the document; every other one of
those is fitted to the model, so that it is answered and not only refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

CONTEXT = 24  # tokens: no answer is long
ROUND = 50  # cases of one operation before it is another's turn
MOST_KEPT = 20  # failures that are printed


@dataclass
class Outcome:
    """What came of some cases."""

    statuses: Counter[int] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.statuses += other.statuses
        self.paths += other.paths
        self.failures += other.failures


class Fuzzer:
    """An application, and cases made of its document."""

    def __init__(self, seed: int) -> None:
        import schemathesis
        from random_engine import RandomEngine
        from server_models import tiny_tokenizer

        from anabranch.llm.server.app import make_app
        from anabranch.llm.server.server_limits import ServerLimits
        from anabranch.llm.server.service import make_service

        limits = ServerLimits(max_queue=16, max_body_bytes=100_000)
        engine = RandomEngine(tiny_tokenizer(), context=CONTEXT)
        service = make_service(engine, limits=limits, model_name="tiny", created=0)
        self._app = make_app(service)
        self._schema = schemathesis.openapi.from_dict(self._app.openapi())
        self._loop = asyncio.new_event_loop()
        self._seeds = count(seed << 32)
        self.outcome = Outcome()

    def run(self, num_cases: int) -> Outcome:
        """Operations in turn, until there were so many cases."""
        strategies, total = list(self._strategies()), 0
        while total < num_cases:
            for strategy in list(strategies):
                most = min(ROUND, num_cases - total)
                done = self._round(strategy, most) if most else 0
                total += done
                if done < min(most, 2):  # a request without parameters has one case
                    strategies.remove(strategy)
        return self.outcome

    def _strategies(self) -> Iterator[Any]:
        from schemathesis import GenerationMode

        for result in self._schema.get_all_operations():
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                yield result.ok().as_strategy(generation_mode=mode)

    def _round(self, strategy: Any, most: int) -> int:
        from hypothesis import HealthCheck, Phase, given, seed, settings
        from hypothesis.errors import Unsatisfiable

        done = 0

        @seed(next(self._seeds))
        @settings(
            max_examples=most,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def send(case: Any) -> None:
            nonlocal done
            done += 1
            self._send(case, fitted=done % 2 == 0)

        with suppress(Unsatisfiable):  # nothing can be wrong with a request without parameters
            send()
        return done

    def _send(self, case: Any, *, fitted: bool) -> None:
        if fitted and isinstance(case.body, dict):
            case.body = sensible(case.body)
        given = case.as_transport_kwargs(base_url="http://localhost")
        body = given.get("data") or b""
        if "json" in given:
            body = json.dumps(given["json"]).encode()
        body = body if isinstance(body, bytes) else str(body).encode("utf-8", "replace")
        try:
            status, answer = self._loop.run_until_complete(
                call(self._app, given["method"], given["url"], given, body)
            )
        except Exception as error:
            status, answer = 500, repr(error).encode()
        self.outcome.statuses[status] += 1
        self.outcome.paths[f"{case.method} {case.operation.path}"] += 1
        # an error after the status of a stream
        broken = b'data: {"error"' in answer and b'"type": "server_error"' in answer
        if status >= 500 or broken:
            where = f"{given['method']} {given['url'][:200]} {body[:400]!r}"
            self.outcome.failures.append(f"{status} {answer[-300:]!r} to {where}")


def sensible(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, of a model, a size and a text that there are."""
    fitted: dict[str, Any] = {}
    if "prompt" in body or "messages" in body:
        fitted = {"model": "tiny", "n": 2, "max_tokens": 8, "max_completion_tokens": None}
    if "prompt" in body and "messages" not in body:
        fitted |= {"prompt": body["prompt"] or "hello", "best_of": None, "suffix": None}
    if fitted:
        fitted |= {"truncate_prompt_tokens": 8, "min_tokens": 0, "logit_bias": None}
    return body | fitted


async def call(
    app: Any, method: str, url: str, given: dict[str, Any], body: bytes
) -> tuple[int, bytes]:
    """Status and body of an answer, without a socket."""
    parts, waiting, sent = urlsplit(url), [body], list[Any]()
    headers = {name.lower(): str(value) for name, value in (given.get("headers") or {}).items()}
    headers |= {"host": "localhost", "content-length": str(len(body))}
    query = parts.query or urlencode(given.get("params") or {}, doseq=True)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method.upper(),
        "scheme": "http",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in headers.items()
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": waiting.pop(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    return start["status"], b"".join(message.get("body", b"") for message in rest)


def fuzz(seed: int, num_cases: int) -> Outcome:
    """In a process of its own."""
    return Fuzzer(seed).run(num_cases)


def main() -> int:
    """Print cases, statuses and every 5xx; 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, whole = time.monotonic(), Outcome()
    shares = [
        options.cases // options.jobs + (job < options.cases % options.jobs)
        for job in range(options.jobs)
    ]
    seeds = [options.seed * 1000 + job for job in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for outcome in pool.map(fuzz, seeds, shares):
            whole.add(outcome)
    print(
        json.dumps(
            {
                "cases": sum(whole.statuses.values()),
                "seed": options.seed,
                "seconds": round(time.monotonic() - start),
                "5xx": len(whole.failures),
                "statuses": dict(sorted(whole.statuses.items())),
                "operations": dict(sorted(whole.paths.items())),
            },
            indent=2,
        )
    )
    for failure in whole.failures[:MOST_KEPT]:
        print("FAILED:", failure)
    return int(bool(whole.failures))


if __name__ == "__main__":
    sys.exit(main())
