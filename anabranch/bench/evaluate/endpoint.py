"""Questions over the OpenAI API: `/completions` with `echo` and `logprobs`, as lm-eval asks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPException
from typing import Any, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from anabranch.bench.evaluate.backend import Advance, Continuation, Scored, choice_start

ATTEMPTS = 20  # at a server that is busy
LONGEST_WAIT = 10.0  # seconds between them
T = TypeVar("T")
S = TypeVar("S")


class EndpointBackend:
    """A server's model; `base_url` ends in /v1 as for OpenAI's client."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
    ) -> None:
        if urlsplit(base_url).scheme not in ("http", "https"):
            raise ValueError(f"--base-url must begin with http:// or https://, got {base_url!r}")
        self._url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._concurrency, self._timeout = concurrency, timeout
        self.model = model or self._first_model()

    @property
    def notes(self) -> list[str]:
        """Who answered."""
        return [f"{self.model} at {self._url}"]

    def loglikelihoods(self, asked: Sequence[Scored], advance: Advance) -> list[list[float]]:
        """The server's own tokens of the context alone tell where each choice begins."""
        texts = [
            asked_for.context + continuation
            for asked_for in asked
            for continuation in ("", *asked_for.continuations)
        ]
        echoed = iter(self._each(self._echo, texts, advance))
        found: list[list[float]] = []
        for each in asked:
            context, _ = next(echoed)
            sums: list[float] = []
            for _ in each.continuations:
                tokens, logprobs = next(echoed)
                chosen = logprobs[choice_start(context, tokens) :]
                sums.append(sum(value for value in chosen if value is not None))
            found.append(sums)
        return found

    def generate(
        self, prompts: Sequence[str], max_tokens: int, advance: Advance
    ) -> list[Continuation]:
        """Greedily."""

        def complete(prompt: str) -> Continuation:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            return Continuation(self._complete(body)["choices"][0]["text"])

        return self._each(complete, prompts, advance)

    def close(self) -> None:
        """Connections are closed already."""

    def _echo(self, text: str) -> tuple[list[str], list[float | None]]:
        """Tokens of a prompt and their logprobs, without the one generated behind them."""
        body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        answer = self._complete(body)
        logprobs: Any = answer["choices"][0].get("logprobs")
        if not logprobs or not logprobs.get("token_logprobs"):
            raise ValueError(
                f"{self._url} sends no logprobs of prompts (echo); try --mode generate"
            )
        values, tokens = logprobs["token_logprobs"], logprobs["tokens"]
        usage: Any = answer.get("usage") or {}
        length = usage.get("prompt_tokens") or len(values) - 1
        if len(values) < length:
            raise ValueError(
                f"{self._url} sent {len(values)} logprobs for {length} tokens: it does not echo "
                f"the prompt; try --mode generate"
            )
        return tokens[:length], values[:length]

    def _each(self, ask: Callable[[S], T], given: Sequence[S], advance: Advance) -> list[T]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            waiting = [pool.submit(ask, one) for one in given]
            try:
                for done, future in enumerate(as_completed(waiting), 1):
                    future.result()
                    advance(done)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [future.result() for future in waiting]

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._call("/completions", body | {"model": self.model})
        if not answer.get("choices"):
            raise ValueError(f"{self._url}/completions answered without choices: {answer}")
        return answer

    def _first_model(self) -> str:
        models = self._call("/models", None).get("data")
        if not models:
            raise ValueError(f"{self._url}/models lists no model; name one with --served-model")
        return models[0]["id"]

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, self._headers)
        for attempt in range(ATTEMPTS):
            try:
                with urlopen(request, timeout=self._timeout) as answer:
                    return _object(answer.read(), self._url + path)
            except HTTPError as error:
                if not _is_busy(error) or attempt + 1 == ATTEMPTS:
                    said = " ".join(error.read().decode(errors="replace").split())[:500]
                    raise OSError(f"{self._url + path} answered {error.code}: {said}") from error
                time.sleep(_wait(error, attempt))
            except (URLError, HTTPException) as error:
                said = error.reason if isinstance(error, URLError) else error
                raise ConnectionError(f"{self._url + path}: {said}") from error
        raise AssertionError("the last attempt returns or raises")


def _is_busy(error: HTTPError) -> bool:
    """A server without a working engine says 503 too, but not when to come back."""
    return error.code == 429 or (error.code == 503 and "retry-after" in error.headers)


def _wait(error: HTTPError, attempt: int) -> float:
    """As long as the server asks for, or longer every time."""
    asked = error.headers.get("retry-after", "")
    return min(float(asked) if asked.isdigit() else 0.1 * 2**attempt, LONGEST_WAIT)


def _object(content: bytes, url: str) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ValueError(f"{url} is no OpenAI endpoint: it answered {content[:80]!r}")
    return cast("dict[str, Any]", answer)
