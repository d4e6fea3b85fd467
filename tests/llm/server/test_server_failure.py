"""A dead engine ends every request with an error; a signal lets them end first."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
from anabranch.llm.server import engine_child, engine_watch, restarting_engine  # noqa: E402
from anabranch.llm.server.deltas import RequestDelta  # noqa: E402
from anabranch.llm.server.engine_child import EngineLoop  # noqa: E402
from anabranch.llm.server.engine_process import EngineProcess  # noqa: E402
from anabranch.llm.server.engine_watch import (  # noqa: E402
    EngineWatch,
    HangPolicy,
    Heartbeat,
)
from anabranch.llm.server.messages import (  # noqa: E402
    Beat,
    Broken,
    Channel,
)
from anabranch.llm.server.restarting_engine import (  # noqa: E402
    RestartBudget,
    RestartingEngine,
    RestartPolicy,
)

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
    admission = SimpleNamespace(grammars=SimpleNamespace(prepare=lambda: None))
    idle = SimpleNamespace(has_work=False, ranks=ranks, admission=admission)
    engine = cast("Any", idle)
    heart = cast("Any", SimpleNamespace(step=nullcontext))
    with pytest.raises(RankLostError, match="rank 1 ended"):
        EngineLoop(engine, cast("Any", None), Queue(), heart).run()


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
    channel = cast("Any", SimpleNamespace(send=sent.append))
    loop = EngineLoop(cast("Any", engine), channel, Queue(), cast("Any", None))
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


class Fake:
    """As much of an `EngineProcess` as a `RestartingEngine` asks for."""

    info, pid, snapshot = None, 0, None

    def __init__(self) -> None:
        self.error: str | None = None
        self._over = threading.Event()

    def end(self, reason: str) -> None:
        self.error = reason
        self._over.set()

    def wait_until_ended(self) -> str:
        self._over.wait()
        return self.error or ""

    async def generate(self, prompts: Any, params: Any) -> AsyncGenerator[Any]:
        yield self

    def close(self) -> None:
        self.end(self.error or "closed")


def test_an_engine_that_ends_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: as it is first started, and as it is started again."""
    started: list[Fake] = []

    class Ending(Fake):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__()
            started.append(self)
            if len(started) < 3:
                self.end("it ended")

    monkeypatch.setattr(restarting_engine, "EngineProcess", Ending)
    engine = RestartingEngine(engine_config(), policy=RestartPolicy(first_delay=0.01))

    async def first() -> Any:
        return await anext(engine.generate({}, SamplingParams()))

    assert asyncio.run(asyncio.wait_for(first(), 20)) is started[2]
    assert (engine.num_restarts, engine.trouble) == (2, None)
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        asyncio.run(asyncio.wait_for(first(), 20))


def test_a_channel_ends_though_the_other_side_does_not_read() -> None:
    ours, theirs = Pipe()
    channel = Channel(ours, lambda message: None, lambda: None)
    channel.send(b"x" * 10_000_000)  # more than a socket holds
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert not channel._writer.is_alive() and not channel._reader.is_alive() and ours.closed
    theirs.close()


@engines_forked()
def test_restarts_leave_no_threads_and_no_sockets() -> None:
    """Of engines that die while nothing is asked of them."""
    engine = RestartingEngine(engine_config(), policy=RestartPolicy(first_delay=0.01))
    this = psutil.Process()

    def held() -> tuple[list[str], int]:
        gc.collect()  # a forked process, unlike a started one, is watched by a pipe
        return sorted(thread.name for thread in threading.enumerate()), this.num_fds()

    def kill_and_wait() -> None:
        before = engine.pid
        kill(engine)
        until(lambda: engine.pid != before and engine.trouble is None, 60)

    kill_and_wait()  # the process server of the forks has its own pipes since then
    before = held()
    kill_and_wait()
    until(lambda: held() == before)
    engine.close()
    names, _ = held()
    assert not [name for name in names if name.startswith(("channel", "engine"))]


@engines_forked()
def test_an_engine_that_stands_still_is_started_again() -> None:
    hangs = HangPolicy(silence_seconds=5.0)
    engine = RestartingEngine(engine_config(), policy=RestartPolicy(first_delay=0.01), hangs=hangs)
    with running_server(engine) as server, ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, server)
        until(lambda: engine.snapshot and engine.snapshot.num_running == 1)
        os.kill(engine.pid, signal.SIGSTOP)
        error = call.result().json()["error"]
        assert error["code"] == "engine_failed"
        assert "the engine hangs: it has sent nothing for" in error["message"]
        assert ask(server, max_tokens=5).status_code == 200
        assert engine.num_restarts == 1
    engine.close()


def test_a_long_step_is_no_hang_and_an_endless_one_is() -> None:
    watch = EngineWatch(HangPolicy(silence_seconds=30, step_seconds=600))
    assert watch.pass_time(1000) is None  # it is being imported
    for taken in range(600):  # one step, whose process sends beats
        watch.hear(Beat(float(taken)))
        assert watch.pass_time(1) is None
    watch.hear(Beat(0.0))
    assert watch.pass_time(30) is None
    assert "sent nothing for 31 seconds" in str(watch.pass_time(1))
    watch.hear(Beat(601.0))
    assert "its step has taken 601 seconds" in str(watch.pass_time(0))


def test_a_step_does_not_silence_the_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "BEAT_SECONDS", 0.01)
    sent: Queue[Beat] = Queue()
    heart = Heartbeat(sent.put)
    assert sent.get(timeout=20) == Beat(0.0)
    with heart.step():
        while not sent.get(timeout=20).step_seconds > 0.05:
            pass
    while sent.get(timeout=20).step_seconds:
        pass


@pytest.mark.parametrize("wrong", [{"silence_seconds": 0.0}, {"step_seconds": float("inf")}])
def test_hangs_that_are_never_or_always(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HangPolicy(**wrong)


def test_an_engine_is_given_up_after_so_many_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    class Dying(Fake):
        """A process that ends at once, and does not start again."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__()
            started.append(time.monotonic())
            if len(started) > 1:
                raise ValueError("the engine did not start: no memory")
            self.end("it ended")

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


def test_restarts_count_for_ten_minutes() -> None:
    budget = RestartBudget(RestartPolicy())
    assert [budget.next_delay(now) for now in (0, 1, 2, 3)] == [1, 2, 4, None]
    budget = RestartBudget(RestartPolicy(max_restarts=1))
    assert [budget.next_delay(now) for now in (0, 600, 1201)] == [1, None, 1]
    budget = RestartBudget(RestartPolicy(max_restarts=1))
    assert [budget.next_delay(now) for now in (0, 600.5, 1201.5)] == [1, 1, 1]


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
    assert os.getsid(engine.pid) == engine.pid  # Ctrl-C in a terminal is for the server alone
    engine.kill()
    assert server.exit_code() == 3
    assert "ERROR:    the engine process ended with exit code -9" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
