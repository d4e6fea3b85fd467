"""`anabranch bench serve`: settings, loads, a row for each, and the server that may be launched."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import IO, NamedTuple

import httpx
import torch

from anabranch.llm.bench.run_results import Record, RunResults, begin_results
from anabranch.llm.bench.serve.endpoint import (
    Endpoint,
    as_dict,
    read_counts,
    settled_counts,
    speculation_between,
)
from anabranch.llm.bench.serve.load_options import Load, LoadOptions
from anabranch.llm.bench.serve.request_bodies import make_bodies
from anabranch.llm.bench.serve.request_load import run_load, summarise
from anabranch.llm.bench.serve.streamed_request import check_answer, send_request
from anabranch.llm.bench.workload import release_memory
from anabranch.llm.cli.engine_options import ServingOptions
from anabranch.llm.cli.options import arguments_of
from anabranch.llm.cli.progress import Progress

START_SECONDS = 1800.0  # a large model is read, compiled and captured
STOP_SECONDS = 90.0
POLL_SECONDS = 0.2
QUEUE = 100_000  # no request is refused


def run_serve(options: LoadOptions, progress: Progress) -> RunResults:
    if options.launch is None:
        return asyncio.run(_measure_running(options, progress))
    device = options.torch_device()
    if options.compare == "graphs" and device.type != "cuda":
        raise ValueError("--compare graphs needs a GPU: there are no CUDA graphs on a CPU")
    results = begin_results("serve", device, options)
    release_memory()
    for name, setting in options.settings().items():
        progress(f"starting a server, {name}", 0, 0)
        start = time.perf_counter()
        sized = replace(setting, max_model_len=setting.max_model_len or setting.longest)
        with launched(options.launch, sized, options.timeout) as server:
            took = time.perf_counter() - start
            rows = asyncio.run(measure(name, setting, server.url, progress))
        results.rows.extend({"startup_seconds": took} | row for row in rows)
    return results


async def _measure_running(options: LoadOptions, progress: Progress) -> RunResults:
    endpoint = _endpoint(options, options.base_url)
    if options.model is None:  # reports at once that there is no server
        await endpoint.first_model()
    results = begin_results("serve", torch.device("cpu"), options)
    device = as_dict(await endpoint.get("/stats")).get("device")
    where = ", ".join(filter(None, (options.base_url, device)))
    results = replace(results, header=replace(results.header, device=where))
    results.rows.extend(await measure(options.base_url, options, options.base_url, progress))
    return results


def _endpoint(options: LoadOptions, url: str) -> Endpoint:
    key = None if options.launch else options.api_key
    return Endpoint(url, api_key=key, timeout=options.timeout)


async def measure(name: str, options: LoadOptions, url: str, progress: Progress) -> list[Record]:
    """Rows of one server under every case and load."""
    endpoint = _endpoint(options, url)
    model = options.model or await endpoint.first_model()
    cases = options.each_case()
    progress("warming up", 0, 0)
    for body in await make_bodies(cases[0], endpoint, model, options.warmup, place=0):
        check_answer(await send_request(endpoint, options.endpoint, body))
    rows: list[Record] = []
    for place, (case, load) in enumerate(product(cases, options.loads()), 1):
        sizes = f"{case.input_len} in, {case.output_len} out"
        label = f"{sizes}, {load.label}" if options.cases else load.label
        row = await _run(case, endpoint, model, load, place, f"{name}, {label}", progress)
        rows.append(row | {"setting": name, "model": model, "load": label})
    return rows


async def _run(
    options: LoadOptions,
    endpoint: Endpoint,
    model: str,
    load: Load,
    place: int,
    what: str,
    progress: Progress,
) -> Record:
    progress(f"making prompts for {what}", 0, 0)
    bodies = await make_bodies(options, endpoint, model, options.num_prompts, place)
    before = await read_counts(endpoint)
    run = await run_load(
        lambda body: send_request(endpoint, options.endpoint, body),
        bodies,
        load,
        seed=options.seed,
        advance=lambda done: progress(what, done, options.num_prompts),
    )
    drafted = speculation_between(before, await settled_counts(endpoint))
    return summarise(run, load) | {"speculation": drafted}


class LaunchedServer(NamedTuple):
    """A process that answers at an address."""

    url: str
    pid: int


@contextmanager
def launched(model: str, options: ServingOptions, timeout: float) -> Generator[LaunchedServer]:
    """A healthy server; it is stopped afterwards, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "anabranch", *serve_arguments(model, options, timeout),
             "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is ours to pass on
        )  # fmt: skip
        try:
            _wait_until_healthy(process, url, log)
            yield LaunchedServer(url, process.pid)
        finally:
            _stop(process)


def serve_arguments(model: str, options: ServingOptions, timeout: float) -> list[str]:
    """The command line of a server with these options, whose limits refuse nothing."""
    engine = arguments_of(ServingOptions, options, without=("model",))
    limits = ["--max-queue", str(QUEUE), "--max-request-seconds", str(timeout)]
    return ["serve", model, *engine, *limits, "--log-level", "warning"]


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "it printed nothing"
            raise ValueError(f"the server ended with {process.returncode}: {reason}")
        time.sleep(POLL_SECONDS)
    raise ValueError(f"the server is not ready after {START_SECONDS:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):  # the rest of its group
        os.killpg(process.pid, signal.SIGKILL)
