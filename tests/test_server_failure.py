"""A dead engine ends every request with an error; a signal lets them end first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)
httpx = pytest.importorskip("httpx")

from server_models import CONTEXT, Server, engine_config, running_server, talking_model, until  # noqa: E402

from anabranch.engine.config import EngineConfig  # noqa: E402
from anabranch.engine.sampling_params import SamplingParams  # noqa: E402
from anabranch.server.engine_process import EngineProcess  # noqa: E402
from anabranch.server.messages import Add  # noqa: E402

LONG = {"prompt": "hello", "max_tokens": CONTEXT - 8, "ignore_eos": True}


@pytest.fixture
def server() -> Iterator[Server]:
    engine = EngineProcess(engine_config())
    with running_server(engine) as running:
        yield running
    engine.close()


def ask(server: Server, **options: Any) -> Any:
    return httpx.post(f"{server.v1}/completions", json=LONG | options, timeout=60)


def kill(engine: EngineProcess) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def break_step(engine: EngineProcess) -> None:
    """A message that its loop does not expect."""
    engine._channel.send(Add("x", [1], cast("SamplingParams", None)))


@pytest.mark.parametrize(("end", "say"), [(kill, "exit code -9"), (break_step, "AttributeError")])
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


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="no model 'nowhere'"):
        EngineProcess(EngineConfig(model="nowhere"))


SERVE = """
import sys
from anabranch.engine.config import EngineConfig
from anabranch.server.command import serve
config = EngineConfig(model=sys.argv[1], device="cpu", max_num_seqs=4)
serve(config, port=int(sys.argv[2]), model_name="tiny", log_level="warning")
"""


@pytest.fixture(scope="module", autouse=True)
def serving() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server in a process of its own, which starts while other tests run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, talking_model(), str(port)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent)
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_a_signal_drains_and_then_ends(serving: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = serving

    def answers() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.ConnectError:
            return False

    until(answers, 60)
    request = LONG | {"stream": True, "max_tokens": 300}
    with httpx.stream("POST", f"{url}/v1/completions", json=request) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(30) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
