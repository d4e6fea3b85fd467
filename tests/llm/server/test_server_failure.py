"""A dead engine ends every request with an error; a signal lets them end first."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue as Queue
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")
psutil = pytest.importorskip("psutil")

from forked_engine import CONTEXT as FORKS  # noqa: E402
from forked_engine import PRELOADED, engines_forked, forked_engine  # noqa: E402
from server_models import CONTEXT, Server, engine_config, running_server, talking_model, until  # noqa: E402

from anabranch.llm.engine.async_llm import EngineDead  # noqa: E402
from anabranch.llm.engine.config import EngineConfig  # noqa: E402
from anabranch.llm.engine.ranks import RankLostError  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server import engine_child, restarting_engine  # noqa: E402
from anabranch.llm.server.channel import Channel  # noqa: E402
from anabranch.llm.server.deltas import RequestDelta  # noqa: E402
from anabranch.llm.server.engine_child import EngineLoop  # noqa: E402
from anabranch.llm.server.engine_process import EngineProcess  # noqa: E402
from anabranch.llm.server.messages import Broken  # noqa: E402
from anabranch.llm.server.restarting_engine import RestartingEngine, RestartPolicy  # noqa: E402

LONG = {"prompt": "hello", "max_tokens": CONTEXT - 8, "ignore_eos": True}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    start, options = request.param
    engine = start(engine_config(**options))
    with running_server(engine) as running:
        yield running
    engine.close()


def ask(server: Server, **options: Any) -> Any:
    return httpx.post(f"{server.v1}/completions", json=LONG | options, timeout=60)


@contextmanager
def enabled(name: str) -> Iterator[None]:
    """Records of a logger reach pytest, whatever a server has set."""
    logger = logging.getLogger(name)
    before = logger.propagate, logger.level
    logger.propagate, logger.level = True, logging.INFO
    yield
    logger.propagate, logger.level = before


def kill(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def break_step(engine: EngineProcess) -> None:
    """A message that its loop does not expect."""
    engine._channel.send(None)


def kill_rank_1(engine: EngineProcess) -> None:
    """The process server that forks ranks is a child of the engine's process."""
    below = {child.pid for child in psutil.Process(engine.pid).children()}
    ranks = psutil.Process(engine.pid).children(recursive=True)
    (rank,) = [process.pid for process in ranks if process.pid not in below]
    os.kill(rank, signal.SIGKILL)


@pytest.mark.parametrize(
    ("server", "end", "say"),
    [
        ((forked_engine, {}), kill, "exit code -9"),
        ((forked_engine, {}), break_step, "AttributeError"),
        (
            (EngineProcess, {"tensor_parallel": 2}),
            kill_rank_1,
            "rank 1 of the engine ended with exit code -9",
        ),
    ],
    indirect=["server"],
)
def test_a_dead_engine_ends_every_request(
    server: Server, end: Callable[[EngineProcess], None], say: str
) -> None:
    stream = httpx.stream("POST", f"{server.v1}/completions", json=LONG | {"stream": True})
    with stream as begun, ThreadPoolExecutor(12) as pool:
        lines = begun.iter_lines()
        assert begun.status_code == 200 and next(lines).startswith("data: ")
        calls: list[Future[Any]] = [pool.submit(ask, server, stream=bool(i % 2)) for i in range(12)]
        until(lambda: server.service.admission.num_open > 4)  # four run, the others wait
        end(server.service.engine)
        killed = time.monotonic()
        last = [line for line in lines if line][-1]
        answers = [call.result() for call in calls]
    assert time.monotonic() - killed < 5  # what is promised, and not how fast it is
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    for answer in answers:
        told = answer.text.strip().rpartition("data: ")[2]
        assert answer.status_code == 500 or "text/event-stream" in answer.headers["content-type"]
        assert json.loads(told)["error"]["code"] == "engine_failed"
    assert 500 in {answer.status_code for answer in answers}  # at least those that waited
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503
    assert say in health.json()["error"]["message"]
    assert ask(server).status_code == 500
    assert 'engine_up{model_name="tiny"} 0.0' in httpx.get(f"{server.url}/metrics").text
    assert not server.service.admission.num_open


def test_an_idle_engine_notices_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise RankLostError("rank 1 ended")

    monkeypatch.setattr(engine_child, "IDLE_SECONDS", 0)
    ranks = SimpleNamespace(check=check)
    engine = cast("Any", SimpleNamespace(has_work=False, ranks=ranks))
    with pytest.raises(RankLostError, match="rank 1 ended"):
        EngineLoop(engine, cast("Any", None), Queue()).run()


def test_a_report_that_fails_ends_no_other() -> None:
    sent: list[Any] = []
    failed = SimpleNamespace(finish_reason="error")
    requests = [
        SimpleNamespace(request_id="bad", seqs=[]),
        SimpleNamespace(request_id="worse", seqs=[failed], error="no text"),
        SimpleNamespace(request_id="good", seqs=[]),
    ]
    delta = RequestDelta("good", [], True, 0, None)
    engine = SimpleNamespace(step=lambda: requests, abort=lambda _: None)
    loop = EngineLoop(cast("Any", engine), cast("Any", SimpleNamespace(send=sent.append)), Queue())
    cursors = {"good": SimpleNamespace(delta=lambda: delta), "bad": None, "worse": None}
    loop._cursors = cast("Any", cursors)
    loop._step()
    bad, worse, outputs = sent
    assert (bad.request_id, worse) == ("bad", Broken("worse", "no text"))
    assert [each.request_id for each in outputs.deltas] == ["good"]
    assert not loop._cursors


def test_an_engine_that_dies_as_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check that it runs and the wait for its tokens."""
    engine = forked_engine(engine_config())
    running_loop = asyncio.get_running_loop

    def die_first() -> asyncio.AbstractEventLoop:
        monkeypatch.undo()
        kill(engine)
        until(lambda: not engine._channel._reader.is_alive())
        return running_loop()

    async def run() -> None:
        monkeypatch.setattr(asyncio, "get_running_loop", die_first)
        async for _ in engine.generate({"x": [1]}, SamplingParams()):
            pass

    with pytest.raises(EngineDead, match="exit code -9"):
        asyncio.run(asyncio.wait_for(run(), 20))
    engine.close()


def test_a_message_that_cannot_be_read_ends_the_channel() -> None:
    """The start of an engine would wait for ever for the message after it."""
    ours, theirs = Pipe()
    closed = threading.Event()
    channel = Channel(ours, lambda message: None, closed.set)
    theirs.send_bytes(b"no pickle")
    assert closed.wait(20)
    with pytest.raises(EOFError):
        theirs.recv()
    channel.close()


@engines_forked()
def test_a_dead_engine_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = RestartingEngine(engine_config(), policy=RestartPolicy(first_delay=0.5))
    with running_server(engine) as server, ThreadPoolExecutor(5) as pool, enabled("anabranch"):
        open_ones = [pool.submit(ask, server) for _ in range(4)]
        until(lambda: server.service.admission.num_open == 4)
        until(lambda: engine.snapshot and engine.snapshot.num_running == 4)
        kill(engine)
        for call in open_ones:
            assert call.result().json()["error"]["code"] == "engine_failed"
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "exit code -9; it is being restarted" in health.json()["error"]["message"]
        for path in ("/stats", "/v1/models", "/v1/models/tiny"):
            assert httpx.get(f"{server.url}{path}").status_code == 503
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'engine_up{model_name="tiny"} 0.0' in metrics
        assert "num_requests_running" not in metrics
        assert ask(server, max_tokens=5).status_code == 200  # it waits for the next engine
        for path in ("/health", "/stats", "/v1/models"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        assert (
            'engine_restarts_total{model_name="tiny"} 1.0'
            in httpx.get(f"{server.url}/metrics").text
        )
    engine.close()
    assert ["exit code -9" in each.message for each in caplog.records].count(True) == 1
    assert "the engine runs again" in caplog.text


def test_an_engine_is_given_up_after_so_many_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    class Dying:
        """A process that ends as soon as it is started again."""

        error, info, pid, trouble, snapshot = "dead", None, 0, "dead", None

        def __init__(self, config: Any, progress: Any = None, *, ended: Any) -> None:
            started.append(time.monotonic())
            if len(started) > 1:
                raise ValueError("the engine did not start: no memory")
            threading.Thread(target=ended, args=("it ended",)).start()

        def close(self) -> None: ...

    monkeypatch.setattr(restarting_engine, "EngineProcess", Dying)
    policy = RestartPolicy(max_restarts=2, first_delay=0.1)
    engine = RestartingEngine(engine_config(), policy=policy)
    until(lambda: engine.given_up)
    assert len(started) == 3
    assert started[2] - started[1] >= 0.2  # twice the first delay

    async def run() -> None:
        async for _ in engine.generate({"x": [1]}, SamplingParams()):
            pass

    with pytest.raises(EngineDead, match="no memory; it was restarted 2 times and is given up"):
        asyncio.run(asyncio.wait_for(run(), 20))
    assert engine.trouble and engine.snapshot is None
    engine.close()


def test_restarts_long_ago_do_not_count() -> None:
    policy = RestartPolicy(max_restarts=1, first_delay=3.0, window_seconds=1e-9)
    engine = RestartingEngine.__new__(RestartingEngine)
    engine._policy, engine._ends = policy, deque()
    assert [engine._next_delay() for _ in range(3)] == [3.0] * 3


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"first_delay": -1.0}])
def test_policies_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RestartPolicy(**wrong)


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="no model 'nowhere'"):
        forked_engine(EngineConfig(model="nowhere"))


def serve_tiny(model: str, port: int, log: Path) -> None:
    """In a process forked from one that has imported torch; its engine's starts by itself."""
    from anabranch.llm.server.command import serve

    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    config = EngineConfig(model=model, device="cpu", max_num_seqs=4, kv_cache_gib=0.001)
    serve(config, port=port, model_name="tiny", max_engine_restarts=0)


class Serving(NamedTuple):
    process: BaseProcess
    url: str
    log: Path

    def answers(self) -> bool:
        assert self.process.is_alive()
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    def exit_code(self) -> int | None:
        self.process.join(30)
        return self.process.exitcode


@pytest.fixture(scope="module", autouse=True)
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    """Two servers in processes of their own, which start while other tests run."""
    servers: list[Serving] = []
    FORKS.set_forkserver_preload(PRELOADED)
    for number in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path_factory.mktemp("serving") / f"{number}.log"
        process = FORKS.Process(target=serve_tiny, args=(talking_model(), port, log))
        process.start()
        servers.append(Serving(process, f"http://127.0.0.1:{port}", log))
    yield servers
    for server in servers:
        server.process.kill()
        server.process.join()


def test_a_signal_drains_and_then_ends(serving: list[Serving]) -> None:
    server = serving[0]
    until(server.answers, 60)
    request = LONG | {"stream": True, "max_tokens": 300}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.exit_code() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_a_server_that_gives_its_engine_up_says_so_and_exits(serving: list[Serving]) -> None:
    server = serving[1]
    until(server.answers, 60)
    started = server.log.read_text()
    stats = httpx.get(f"{server.url}/stats").json()
    assert 0 < stats["cache_tokens"] < 4 * CONTEXT
    assert f"tiny on cpu, a cache of {stats['cache_tokens']} tokens" in started
    assert f"page to chat on: {server.url}/\n" in started
    (engine,) = psutil.Process(server.process.pid).children()
    engine.kill()
    assert server.exit_code() == 3
    assert "ERROR:    the engine process ended with exit code -9" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
