"""An OpenAI endpoint: its models, its tokenizer, its status and what it counts, by httpx."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any, cast

import httpx

from anabranch.llm.bench.run_results import Record

ABSENT = (404, 405, 501)
CALL_SECONDS = 60.0  # for requests that generate nothing
SETTLE_SECONDS = 0.3  # our server renews its counts five times a second
SETTLE_TRIES = 10
SAMPLE = re.compile(
    r'^(?:anabranch|vllm):spec_decode_num_(\w+)_total(?:\{.*?(?:position="(\d+)".*)?\})?\s+(\S+)',
    re.MULTILINE,
)
DraftCounts = Counter[str | int]  # drafts, draft_tokens, accepted_tokens; accepted by position


class Endpoint:
    """One server. A connection serves one request, so that none is found closed."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 60.0) -> None:
        self.url = str(check_url(base_url)).rstrip("/").removesuffix("/v1")
        self.timeout = timeout  # of a request that generates
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body of a request that is answered at once."""
        seconds = min(self.timeout, CALL_SECONDS)
        reply = await self.http.request(method, path, json=body, timeout=seconds)
        return reply.status_code, parse_body(reply)

    async def first_model(self) -> str:
        """The model that the server lists first."""
        try:
            status, body = await self.call("GET", "/v1/models")
        except httpx.HTTPError as error:
            raise ConnectionError(f"no server answers at {self.url} ({error!r})") from error
        models = as_dict(body).get("data")
        if status != 200 or not models:
            reason = f"{self.url}/v1/models answers {status}: {error_message(body)}"
            raise ValueError(f"{reason}; give --api-key or --model")
        return str(models[0]["id"])

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """Tokens of a text that is not empty; None where the server has no such endpoint.

        A ValueError means that it has the endpoint and no tokenizer.
        """
        found: Any = None
        llama_cpp = {"content": text}
        for body in ({"model": model, "prompt": text, "add_special_tokens": False}, llama_cpp):
            status, found = await self.call("POST", "/tokenize", body)
            if status in ABSENT:
                return None
            if status == 200 and (tokens := as_dict(found).get("tokens")):
                return tokens
        raise ValueError(error_message(found))

    async def get(self, path: str) -> Any:
        """The body at a path; None without an answer of 200."""
        try:
            status, body = await self.call("GET", path)
        except httpx.HTTPError:
            return None
        return body if status == 200 else None


def check_url(base_url: str) -> httpx.URL:
    """An address like http://HOST:PORT, with or without /v1."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
    return url


def parse_body(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text


def as_dict(value: object) -> dict[str, Any]:
    """A JSON object as it is, anything else as an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def error_message(body: object) -> str:
    """The message of an error body, in one line."""
    for key in ("error", "message", "detail"):
        body = as_dict(body).get(key, body)
    text = body if isinstance(body, str) else json.dumps(body)
    return " ".join(text.split())[:300]


def parse_counts(metrics: str) -> DraftCounts:
    """Sums over all models and engines since the server started."""
    counts: DraftCounts = Counter()
    for name, position, value in SAMPLE.findall(metrics):
        counts[int(position) if position else name] += int(float(value))
    return counts


async def read_counts(endpoint: Endpoint) -> DraftCounts:
    metrics = await endpoint.get("/metrics")
    return parse_counts(metrics if isinstance(metrics, str) else "")


async def settled_counts(endpoint: Endpoint) -> DraftCounts:
    """The counts once two readings agree: they may lag the tokens."""
    counts = await read_counts(endpoint)
    for _ in range(SETTLE_TRIES if counts else 0):
        await asyncio.sleep(SETTLE_SECONDS)
        before, counts = counts, await read_counts(endpoint)
        if counts == before:
            break
    return counts


def speculation_between(before: DraftCounts, after: DraftCounts) -> Record | None:
    """Acceptance between two readings; None if nothing was drafted."""
    new = Counter({name: count - before[name] for name, count in after.items()})
    drafts, tokens, accepted = new["drafts"], new["draft_tokens"], new["accepted_tokens"]
    if not drafts:
        return None
    positions = [name for name in after if isinstance(name, int)]
    return {
        "acceptance_rate": 100 * accepted / tokens if tokens else 0.0,
        "acceptance_length": 1 + accepted / drafts,
        "num_drafts": drafts,
        "draft_tokens": tokens,
        "accepted_tokens": accepted,
        "per_position_acceptance": [
            100 * new[place] / drafts for place in range(max(positions, default=-1) + 1)
        ],
    }
