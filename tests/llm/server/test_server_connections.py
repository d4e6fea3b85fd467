"""Connections end that send half a request or read no answer, and all when the drain is over."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")

import uvicorn  # noqa: E402
from forked_engine import forked_engine  # noqa: E402
from server_models import CONTEXT, Server, engine_config, running_server, until  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from anabranch.llm.server.engine_process import EngineProcess  # noqa: E402
from anabranch.llm.server.http_server import GuardedProtocol, guarded_by  # noqa: E402
from anabranch.llm.server.server_limits import ServerLimits  # noqa: E402

HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = {"prompt": "hello", "max_tokens": CONTEXT - 8, "ignore_eos": True}
ENDLESS = 3600.0  # seconds


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    process = forked_engine(engine_config())
    yield process
    process.close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(server.http.servers[0].sockets[0].getsockname(), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(1 << 16):
        received += more
    return received


def error_of(received: bytes) -> dict[str, Any]:
    return json.loads(received.partition(b"\r\n\r\n")[2])["error"]


def is_alone(server: Server) -> bool:
    return not server.http.server_state.connections


def test_half_open_connections_disappear(engine: EngineProcess) -> None:
    with running_server(engine, header_seconds=1.0, body_seconds=1.0) as server:
        halves = [HEADERS] * 300 + [HEADERS + b'Content-Length: 90\r\n\r\n{"prompt": '] * 100
        connections = [connect(server) for _ in halves]
        for connection, half in zip(connections, halves, strict=True):
            connection.sendall(half)
        assert httpx.post(f"{server.v1}/completions", json={"prompt": "a"}).status_code == 200
        answers = [read_all(connection) for connection in connections]
        until(lambda: is_alone(server))
        for answer, part in zip(answers, ["headers"] * 300 + ["body"] * 100, strict=True):
            assert answer.startswith(b"HTTP/1.1 408")
            assert error_of(answer)["code"] == "slow_request"
            assert part in error_of(answer)["message"]
        for connection in connections:
            connection.close()


class Timers:
    """A loop's clock that stands still, and what was to be called later."""

    def __init__(self) -> None:
        self.set: list[float] = []

    def call_later(self, seconds: float, call: Any) -> Any:
        self.set.append(seconds)
        return SimpleNamespace(cancel=lambda: None)

    def time(self) -> float:
        return 0.0

    def create_task(self, answering: Any) -> Any:
        answering.close()
        return Future[None]()


class Wire:
    """The transport of a connection that nobody is at the other end of."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str) -> Any:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def guarded(**limits: Any) -> tuple[GuardedProtocol, Timers, Wire]:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    timers, wire = Timers(), Wire()
    protocol = guarded_by(ServerLimits(**limits))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level="critical")
    connection = protocol(config, ServerState(), {}, cast("Any", timers))
    connection.connection_made(cast("Any", wire))
    return connection, timers, wire


def test_headers_and_bodies_have_deadlines_of_their_own() -> None:
    connection, timers, wire = guarded(header_seconds=3.0, body_seconds=70.0)
    assert timers.set == [3.0]
    connection.data_received(HEADERS)
    assert timers.set == [3.0]
    connection.data_received(b"Content-Length: 90\r\n\r\n{")
    assert timers.set == [3.0, 70.0]
    connection.data_received(b'"prompt')
    assert timers.set == [3.0, 70.0]
    connection._expire()
    assert "the body of the request did not arrive within 70 s" in wire.written.decode()
    connection, timers, wire = guarded(header_seconds=3.0, body_seconds=70.0)
    connection.data_received(HEADERS)
    connection._expire()
    assert "the headers of the request did not arrive within 3 s" in wire.written.decode()


def test_a_new_connection_ends_the_one_that_waits_longest(engine: EngineProcess) -> None:
    """Not one whose request is being answered; with such ones alone, the new one is refused."""
    with running_server(engine, max_connections=3, header_seconds=ENDLESS) as server:
        halves = [connect(server) for _ in range(3)]
        for number, half in enumerate(halves):
            half.sendall(HEADERS)
            until(lambda: num_begun(server) == number + 1)  # noqa: B023
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert error_of(read_all(halves[0]))["code"] == "too_many_connections"
        for half in halves:
            half.close()
        until(lambda: is_alone(server))
        with ThreadPoolExecutor(3) as pool:
            os.kill(engine.pid, signal.SIGSTOP)
            url = f"{server.v1}/completions"
            body = LONG | {"max_tokens": 5}
            calls = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(3)]
            until(lambda: server.service.admission.num_open == 3)
            with connect(server) as late:
                refused = read_all(late)
            os.kill(engine.pid, signal.SIGCONT)
            assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1\r\n" in refused.lower()
            assert "3 connections" in error_of(refused)["message"]
            assert [call.result().status_code for call in calls] == [200] * 3


def num_begun(server: Server) -> int:
    """Connections that have sent something."""
    return sum(bool(each.conn.trailing_data[0]) for each in server.http.server_state.connections)


@pytest.mark.parametrize("reading", ["headers", "body"])
def test_bytes_now_and_then_do_not_keep_a_connection(engine: EngineProcess, reading: str) -> None:
    start = HEADERS if reading == "headers" else HEADERS + b"Content-Length: 1000000\r\n\r\n"
    with running_server(engine, header_seconds=0.3, body_seconds=0.3) as server:
        connection, ended = connect(server), threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    connection.send(b"x")

        with connection, ThreadPoolExecutor(1) as pool:
            connection.sendall(start)
            until(lambda: not is_alone(server))
            pool.submit(drip)
            until(lambda: is_alone(server))
            ended.set()


def test_half_a_second_request_ends_silently_or_with_an_error(engine: EngineProcess) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running_server(engine, header_seconds=1.0) as server:
        for begun in (b"", b"GET /hea"):
            with connect(server) as connection:
                connection.sendall(whole)
                answer = b""
                while b'"ok"' not in answer:
                    answer += connection.recv(1 << 16)
                connection.sendall(begun)
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 408" if begun else b"")
                assert bool(answer) == bool(begun)


def test_a_refused_body_that_never_ends(engine: EngineProcess) -> None:
    """A 401 is sent before the body is read, and the rest of it is not waited for for ever."""
    with (
        running_server(engine, api_key="s3cret", body_seconds=1.0) as server,
        connect(server) as connection,
    ):
        connection.sendall(HEADERS + b"Content-Length: 1000000\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 401")
        until(lambda: is_alone(server))


def test_a_client_that_reads_nothing_is_left(engine: EngineProcess) -> None:
    with running_server(engine, max_request_seconds=1.0) as server, connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        until(lambda: not is_alone(server))
        (guarded,) = server.http.server_state.connections
        ours = guarded.transport.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        until(lambda: is_alone(server))


def test_readers_who_wait_hold_up_nobody(engine: EngineProcess) -> None:
    """Sixteen read nothing of long answers: these are computed all the same, and so are others'."""
    fields = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields | {"stream": True, "logprobs": 20}).encode()
    request = HEADERS + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with running_server(engine) as server, contextlib.ExitStack() as readers:
        slow = [readers.enter_context(socket.socket()) for _ in range(16)]
        for connection in slow:
            connection.settimeout(20)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(server.http.servers[0].sockets[0].getsockname())
        until(lambda: len(server.http.server_state.connections) == 16)
        for guarded in server.http.server_state.connections:
            ours = guarded.transport.get_extra_info("socket")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for connection in slow:
            connection.sendall(request)
        until(lambda: server.service.admission.num_open == 16)
        beside = httpx.post(f"{server.v1}/completions", json=fields, timeout=60).json()
        until(lambda: engine.snapshot and not engine.snapshot.num_running)
        until(lambda: server.service.admission.num_open <= 16)  # the answer beside them has ended
        assert server.service.admission.num_open == 16  # computed, and nobody has read them
        received = [read_all(connection) for connection in slow]
        until(lambda: not server.service.admission.num_open)
    for each in received:
        lines = [line for line in each.decode().splitlines() if line.startswith("data: {")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == beside["choices"][0]["text"]
        assert b"data: [DONE]" in each


class Records(logging.Handler):
    """What a server logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_what_is_open_when_the_drain_ends_gets_an_error(engine: EngineProcess) -> None:
    logger, log = logging.getLogger("uvicorn.error"), Records()
    with running_server(engine, body_seconds=ENDLESS, drain_seconds=0.3) as server:
        logger.addHandler(log)
        logger.setLevel(logging.INFO)
        stream = httpx.stream("POST", f"{server.v1}/completions", json=LONG | {"stream": True})
        with stream as begun, ThreadPoolExecutor(12) as pool, connect(server) as half:
            lines = begun.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(engine.pid, signal.SIGSTOP)  # nothing ends by itself
            url = f"{server.v1}/completions"
            calls = [pool.submit(httpx.post, url, json=LONG, timeout=60) for _ in range(12)]
            until(lambda: server.service.admission.num_open == 13)
            half.sendall(HEADERS + b"Content-Length: 90\r\n\r\n{")
            until(lambda: len(server.http.server_state.connections) == 14)
            server.http.should_exit = True
            last = [line for line in lines if line][-1]
            answers = [call.result() for call in calls]
            assert error_of(read_all(half))["code"] == "shutting_down"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        for answer in answers:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
        until(lambda: is_alone(server))
    os.kill(engine.pid, signal.SIGCONT)
    logger.removeHandler(log)
    assert not [record for record in log.records if record.exc_info]
