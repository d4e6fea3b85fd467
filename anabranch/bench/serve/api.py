"""What a server offers besides answers: its models, its tokenizer, its counters."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, cast

from anabranch.bench.serve.http_client import Site, open_response

ABSENT = (404, 405, 501)
CALL_SECONDS = 60.0  # for what generates nothing


class Reply(NamedTuple):
    """A status and the body, parsed if it is JSON."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """What an error says, in one line."""
        said = self.body
        for key in ("error", "message", "detail"):
            said = fields_of(said).get(key, said)
        text = said if isinstance(said, str) else json.dumps(said)
        return " ".join(text.split())[:300]


class Api:
    """One server."""

    def __init__(self, site: Site, timeout: float) -> None:
        self.site = site
        self.timeout = timeout  # of a request that generates

    async def call(self, method: str, path: str, body: object = None) -> Reply:
        """A request that is answered at once."""
        data = None if body is None else json.dumps(body).encode()
        async with (
            asyncio.timeout(min(self.timeout, CALL_SECONDS)),
            open_response(self.site, method, path, data) as response,
        ):
            return Reply(response.status, parse_body(await response.read()))

    async def first_model(self) -> str:
        """The model that a server names first."""
        where = f"http{'s' * self.site.secure}://{self.site.host}:{self.site.port}"
        try:
            reply = await self.call("GET", "/v1/models")
        except OSError as error:  # a timeout, too
            why = str(error) or f"nothing in {min(self.timeout, CALL_SECONDS):g} s"
            raise ConnectionError(f"no server answers at {where} ({why})") from error
        if reply.status != 200:
            raise ValueError(
                f"{where}/v1/models answers {reply.status}: {reply.message}; "
                "give --api-key or --model"
            )
        try:
            return str(reply.body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{where}/v1/models names no model; give --model") from None

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """Tokens of a text that is not empty; None where the server has no such endpoint.

        A ValueError says that it has the endpoint and no tokenizer.
        """
        reply = Reply(200, None)
        bodies: tuple[object, ...] = (
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text},  # llama.cpp's
        )
        for body in bodies:
            reply = await self.call("POST", "/tokenize", body)
            if reply.status in ABSENT:
                return None
            tokens: list[int] | None = fields_of(reply.body).get("tokens")
            if reply.status == 200 and tokens:
                return tokens
        raise ValueError(reply.message)

    async def detokenize(self, model: str, tokens: list[int]) -> str | None:
        """The text of tokens, if the server can tell."""
        for body in ({"model": model, "tokens": tokens}, {"tokens": tokens}):
            reply = await self.call("POST", "/detokenize", body)
            said = fields_of(reply.body)
            text = said.get("prompt", said.get("content"))
            if reply.status == 200 and isinstance(text, str):
                return text
        return None

    async def get(self, path: str) -> Any:
        """What stands at a path; None where nothing does."""
        try:
            reply = await self.call("GET", path)
        except OSError:
            return None
        return reply.body if reply.status == 200 else None


def fields_of(value: object) -> dict[str, Any]:
    """A JSON object as it is; of anything else, no fields."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def parse_body(data: bytes) -> Any:
    """JSON, or text."""
    text = data.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
