"""Runs cases: inputs, the exact result, then each implementation checked and only then timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from anabranch.llm.bench.run_results import make_header
from anabranch.llm.bench.table import print_paths, print_table
from anabranch.llm.bench.workload import synchronize
from anabranch.llm.cli.progress import progress_bars
from anabranch.llm.engine.config import EngineConfig
from attention_bench import ours, peers
from attention_bench.attention_options import AttentionOptions
from attention_bench.case_results import Results, Row, blank_row, with_ratios
from attention_bench.case_table import make_table
from attention_bench.cases import Case
from attention_bench.ceilings import Ceilings, measure_ceilings
from attention_bench.exact import Expected, expected_of
from attention_bench.grids import COMPOSITIONS, cases_of, load_suite
from attention_bench.implementations import Implementation, Prepared, UnavailableError
from attention_bench.inputs import Inputs, make_inputs
from attention_bench.peers.site import add_folder
from attention_bench.timing import time_graph, time_loop

MAX_EAGER_US = 1000.0  # above, the host is never what a call waits for
BROKEN = ("wrong", "failed")
Advance = Callable[[str], None]  # called with the name of what starts


def run_and_print(bench: str, options: AttentionOptions) -> bool:
    """Run a benchmark and print its table; False if one of our implementations failed."""
    results = run(bench, options)
    print_table(make_table(results))
    print_paths(options.out)
    return not any(row.role == "ours" and row.status in BROKEN for row in results.rows)


def run(bench: str, options: AttentionOptions) -> Results:
    """Run a benchmark; the rows so far are saved after every case."""
    device = EngineConfig(device=options.device or None).resolve_device()
    cases = cases_of(bench, device.type, quick=options.quick, pattern=options.filter)
    implementations = select(bench, options.impl, device)
    if not cases or not implementations:
        raise ValueError(
            f"nothing to run: {len(cases)} cases match {options.filter!r}, "
            f"{len(implementations)} implementations match {options.impl}"
        )
    add_folder()
    ceilings = measure_ceilings(device)
    results = Results(make_header(bench, device), ceilings, [])
    places = count()
    total = len(cases) * len(implementations)
    with progress_bars() as progress:

        def advance(name: str) -> None:
            progress(name, next(places), total)

        for case in cases:
            results.rows.extend(run_case(case, implementations, device, ceilings, advance))
            if options.out:
                results.save(options.out)
            if not _alive(device):
                break
    return results


def select(bench: str, names: Sequence[str], device: torch.device) -> list[Implementation]:
    """The implementations whose name has one of `names`; all of them if there are none."""
    if bench in COMPOSITIONS:
        found = load_suite(bench).implementations(device.type)
    else:
        found = [*(x for room in (ours, peers) for x in room.implementations(bench, device.type))]
    wanted = [name.lower() for name in names]
    return [x for x in found if not wanted or any(name in x.name.lower() for name in wanted)]


def run_case(
    case: Case,
    implementations: Sequence[Implementation],
    device: torch.device,
    ceilings: Ceilings,
    advance: Advance,
) -> list[Row]:
    """All implementations in one case, on the same inputs."""
    inputs, expected = getattr(case, "prepare", partial(_prepare, case))(device)
    rows: list[Row] = []
    for implementation in implementations:
        advance(f"{case.name}: {implementation.name}")
        row = _measure(implementation, inputs, expected, device)
        if row.us is not None:
            rate = case.work / row.us / (1e6 if row.unit == "TFLOP/s" else 1e3)
            # Of what lies in the cache, memory's rate is no ceiling.
            percent = None if getattr(case, "warm", False) else ceilings.percent(rate, row.unit)
            row = replace(row, rate=rate, percent_of_ceiling=percent)
        rows.append(row)
    return with_ratios(rows)


def _prepare(case: Case, device: torch.device) -> tuple[Inputs, Expected]:
    """For cases that do not do it themselves."""
    inputs = make_inputs(case, device)
    return inputs, expected_of(inputs)


def _measure(
    implementation: Implementation, inputs: Inputs, expected: Expected, device: torch.device
) -> Row:
    case = inputs.case
    try:
        prepared = implementation.prepare(inputs)
        row = blank_row(case, implementation, "ok")
        with prepared.context():
            return _measure_prepared(prepared, row, prepared.expected or expected, device)
    except UnavailableError as reason:
        return blank_row(case, implementation, "unavailable", str(reason))
    except Exception as failure:
        note = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return blank_row(case, implementation, "failed", note)


def _measure_prepared(
    prepared: Prepared, row: Row, expected: Expected, device: torch.device
) -> Row:
    answer = prepared.answer(prepared.calls[0]())
    complaint = expected.complaint(answer)
    if complaint:
        return replace(row, status="wrong", note=complaint)
    row = replace(row, error=expected.error(answer))
    if prepared.plan is not None:
        row = replace(row, plan_us=time_loop([prepared.plan], device).us)
    if device.type == "cpu":
        timing = time_loop(prepared.calls, device)
        return replace(row, us=timing.us, spread=timing.spread)
    timing, replayed = time_graph(prepared.calls, device)
    complaint = expected.complaint(prepared.answer(replayed))
    if complaint:
        return replace(row, status="wrong", note=f"in a CUDA graph, {complaint}")
    eager = time_loop(prepared.calls, device).us if timing.us < MAX_EAGER_US else None
    return replace(row, us=timing.us, spread=timing.spread, eager_us=eager)


def _alive(device: torch.device) -> bool:
    """Whether the device still answers: after a fault, no later time would be right."""
    with suppress(RuntimeError):
        synchronize(device)
        return True
    return False
