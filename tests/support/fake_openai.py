"""A tiny OpenAI endpoint on a port of its own, whose answers a test decides."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
Answer = Callable[["FakeServer", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeServer:
    """Knows 300 tokens: the words it was asked to tokenize, in the order it met them."""

    answer: Answer
    tokenizer: str | None = "vllm"  # or "llama.cpp", "missing"; None refuses
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=dict)
    num_open: int = 0
    most_open: int = 0
    drafts: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, _ = (await reader.readline()).decode().split()
            headers: dict[str, str] = {}
            while line := (await reader.readline()).decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            body = json.loads(data or b"{}")
            if path.endswith("/completions"):
                self.headers.append(headers)
                await self._complete(body | {"path": path}, writer)
            else:
                await self._tell(method, path, body, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.answer(self, body, writer)
        finally:
            self.num_open -= 1

    async def _tell(self, method: str, path: str, body: Any, writer: Any) -> None:
        if path == "/v1/models":
            reply(writer, 200, {"object": "list", "data": [{"id": "fake"}, {"id": "other"}]})
        elif path == "/metrics":
            reply(writer, 200, self._metrics(), content="text/plain")
        elif path == "/tokenize" and self.tokenizer != "missing":
            self._tokenize(body, writer)
        elif path == "/detokenize" and self.tokenizer != "missing":
            names = list(self.words)
            text = " ".join(names[token] for token in body["tokens"])
            reply(writer, 200, {"prompt" if self.tokenizer == "vllm" else "content": text})
        else:
            reply(writer, 404, {"error": f"no {method} {path}"})

    def _tokenize(self, body: dict[str, Any], writer: Any) -> None:
        if self.tokenizer is None:
            reply(writer, 400, {"error": {"message": "this model has no tokenizer"}})
            return
        # llama.cpp answers any body, and finds nothing in one without its own field
        text = body.get("prompt" if self.tokenizer == "vllm" else "content", "")
        tokens = [self.words.setdefault(word, len(self.words)) for word in text.split()]
        reply(writer, 200, {"tokens": tokens})

    def _metrics(self) -> str:
        name = "vllm:spec_decode_num"
        return (
            f'# TYPE {name}_drafts counter\n{name}_drafts_total{{engine="0"}} {self.drafts}.0\n'
            f'{name}_draft_tokens_total{{engine="0"}} {4 * self.drafts}.0\n'
            f'{name}_accepted_tokens_total{{engine="0"}} {self.drafts}.0\n'
            f'{name}_accepted_tokens_per_pos_total{{engine="0",position="0"}} {self.drafts}.0\n'
            f'{name}_accepted_tokens_per_pos_total{{engine="0",position="1"}} 0.0\n'
        )


def reply(writer: Any, status: int, body: Any, content: str = JSON, **headers: str) -> None:
    """An answer that is whole."""
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content}", f"Content-Length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)


def begin_stream(writer: Any) -> None:
    writer.write(
        f"HTTP/1.1 200 OK\r\nContent-Type: {EVENTS}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )


def send(writer: Any, data: bytes) -> None:
    """A chunk of HTTP; none of no bytes ends the body."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def event(choices: Sequence[dict[str, Any]] = (), **more: Any) -> bytes:
    return f"data: {json.dumps({'choices': list(choices), **more})}\n\n".encode()


def token(body: dict[str, Any], text: str, finish: str | None = None) -> bytes:
    chat = "chat" in body["path"]
    said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
    return event([{"index": 0, "finish_reason": finish, **said}])


def usage(num_input: int, num_output: int, num_cached: int = 0) -> bytes:
    details = {"cached_tokens": num_cached}
    return event(
        usage={
            "prompt_tokens": num_input,
            "completion_tokens": num_output,
            "prompt_tokens_details": details,
        }
    )


async def fluent(server: FakeServer, body: dict[str, Any], writer: Any) -> None:
    """As many tokens as asked for, two to a chunk, and a draft for each chunk."""
    begin_stream(writer)
    if "chat" in body["path"]:
        send(writer, event([{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
    for left in range(body["max_tokens"], 0, -2):
        server.drafts += 1
        send(writer, token(body, "ö ö", "length" if left <= 2 else None))
        await writer.drain()
    prompt = body.get("prompt", "")
    count = len(prompt.split() if isinstance(prompt, str) else prompt)
    send(writer, usage(count, body["max_tokens"]) + b"data: [DONE]\n\n")
    send(writer, b"")


@contextmanager
def running(answer: Answer = fluent, **options: Any) -> Iterator[FakeServer]:
    """In a thread, until the test ends."""
    fake, started, stop = FakeServer(answer, **options), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(20)
