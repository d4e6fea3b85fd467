"""An OpenAI endpoint: its models, its tokenizer and its status, by httpx."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx

ABSENT = (404, 405, 501)
CALL_SECONDS = 60.0  # for requests that generate nothing


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
