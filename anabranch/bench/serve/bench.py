"""`anabranch bench serve`: settings, loads, rows."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from anabranch.bench.engine.bars import Progress
from anabranch.bench.engine.engine_options import release
from anabranch.bench.engine.run_results import RunResults, begin_results
from anabranch.bench.serve.alone import Measured, time_engine
from anabranch.bench.serve.api import Api, fields_of
from anabranch.bench.serve.ask import ask
from anabranch.bench.serve.http_client import parse_site
from anabranch.bench.serve.launch import launched
from anabranch.bench.serve.load import run_load
from anabranch.bench.serve.options import Load, ServeOptions, Variant
from anabranch.bench.serve.outcome import Outcome
from anabranch.bench.serve.prompts import make_prompts
from anabranch.bench.serve.speculation import read_counts, settled_counts, speculation
from anabranch.bench.serve.summary import summarise

WARM_TOKENS = 16  # of an answer before the clock runs


def run_serve(options: ServeOptions, progress: Progress) -> RunResults:
    """A row for each setting and load."""
    if options.launch is None:
        parse_site(options.base_url)
        return asyncio.run(_measure_running(options, progress))
    device = options.torch_device()
    if options.compare == "graphs" and device.type != "cuda":
        raise ValueError("--compare graphs needs a GPU: there are no CUDA graphs on a CPU")
    results = _begin(options, device)
    release()
    variants = options.variants()
    for variant in variants:
        start = time.perf_counter()
        with launched(variant, progress) as url:
            took = time.perf_counter() - start
            runs = asyncio.run(measure(variant, url, progress))
        if options.engine and variant is variants[-1]:
            progress(f"timing the engine alone, {variant.name}", 0, 0)
            time_engine(variant, runs)
        results.rows.extend({"startup_seconds": took} | run.row for run in runs)
    return results


async def _measure_running(options: ServeOptions, progress: Progress) -> RunResults:
    (variant,) = options.variants()
    api = _api(options, options.base_url)
    if options.model is None:  # a server that is not there is told at once
        await api.first_model()
    results = _begin(options, torch.device("cpu"))
    device = fields_of(await api.get("/stats")).get("device")
    where = f"{options.base_url}, {device}" if device else options.base_url
    results = replace(results, header=replace(results.header, device=where))
    runs = await measure(variant, options.base_url, progress)
    results.rows.extend(run.row for run in runs)
    return results


def _begin(options: ServeOptions, device: torch.device) -> RunResults:
    results = begin_results("serve", device, options)
    results.options.pop("api_key", None)  # not for a file that others read
    if options.launch is not None:
        del results.options["base_url"]
    if math.isinf(options.request_rate):
        del results.options["request_rate"]  # JSON has no infinity
    return results


def _api(options: ServeOptions, url: str) -> Api:
    key = None if options.launch else options.api_key
    return Api(parse_site(url, key), options.timeout)


async def measure(variant: Variant, url: str, progress: Progress) -> list[Measured]:
    """One server under every case and load."""
    options, api = variant.options, _api(variant.options, url)
    model = options.model or await api.first_model()
    cases = options.each_case()
    progress("warming up", 0, 0)
    for body in await _bodies(cases[0], api, model, options.warmup, place=0):
        await _warm_up(options, api, body)
    runs: list[Measured] = []
    for place, (case, load) in enumerate(product(cases, options.loads()), 1):
        label = f"{case.sizes}, {load.label}" if options.cases else load.label
        what = f"{variant.name}, {label}"
        run = await _run(case, api, model, load, place, what, progress)
        run.row.update({"setting": variant.name, "model": model, "load": label})
        runs.append(run)
    return runs


async def _warm_up(options: ServeOptions, api: Api, body: dict[str, Any]) -> None:
    body["max_tokens"] = min(body["max_tokens"], WARM_TOKENS)
    outcome = await _ask(options, api, body)
    if outcome.failure is not None:
        raise ValueError(
            f"the server fails to answer: {outcome.failure.kind}: {outcome.failure.said}"
        )


async def _run(
    options: ServeOptions,
    api: Api,
    model: str,
    load: Load,
    place: int,
    what: str,
    progress: Progress,
) -> Measured:
    progress(f"making prompts for {what}", 0, 0)
    bodies = await _bodies(options, api, model, options.num_prompts, place=place)
    before = await read_counts(api)
    run = await run_load(
        lambda body: _ask(options, api, body),
        bodies,
        load,
        seed=options.seed,
        advance=lambda done: progress(what, done, options.num_prompts),
    )
    drafted = speculation(before, await settled_counts(api))
    return Measured(summarise(run, load) | {"speculation": drafted}, load, bodies)


async def _bodies(
    options: ServeOptions, api: Api, model: str, count: int, place: int
) -> list[dict[str, Any]]:
    prompts = await make_prompts(options, api, model, count, place)
    return [prompt.body(model, options) for prompt in prompts]


async def _ask(options: ServeOptions, api: Api, body: dict[str, Any]) -> Outcome:
    return await ask(api, options.endpoint, body)
