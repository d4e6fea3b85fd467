"""Runs cases: inputs, the exact result, then each implementation checked and only then timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from anabranch.bench import ours, peers
from anabranch.bench.cases import Case
from anabranch.bench.ceilings import Ceilings, measure_ceilings
from anabranch.bench.exact import Expected, expected_of
from anabranch.bench.grids import cases_of
from anabranch.bench.implementations import Implementation, Prepared, UnavailableError
from anabranch.bench.inputs import Inputs, make_inputs
from anabranch.bench.peers.site import add_folder
from anabranch.bench.progress import Advance, progress
from anabranch.bench.results import Results, Row, blank_row, make_header, with_ratios
from anabranch.bench.timing import synchronize, time_graph, time_loop

MAX_EAGER_US = 1000.0  # above, the host is never what a call waits for


@dataclass(frozen=True, slots=True)
class Options:
    """What to run; empty means everything."""

    bench: str
    device: str = ""  # the GPU if there is one
    pattern: str = ""  # cases whose name, model or group has it
    impls: tuple[str, ...] = ()  # implementations whose name has one of these
    quick: bool = False
    out: Path | None = None


def run(options: Options) -> Results:
    """Run a benchmark; what is known is saved after every case."""
    device = _device(options.device)
    cases = cases_of(options.bench, device.type, quick=options.quick, pattern=options.pattern)
    implementations = select(options, device)
    if not cases or not implementations:
        raise ValueError(
            f"nothing to run: {len(cases)} cases match {options.pattern!r}, "
            f"{len(implementations)} implementations match {options.impls}"
        )
    add_folder()
    ceilings = measure_ceilings(device)
    results = Results(make_header(options.bench, device, ceilings), [])
    with progress(len(cases) * len(implementations)) as advance:
        for case in cases:
            results.rows.extend(run_case(case, implementations, device, ceilings, advance))
            if options.out:
                results.save(options.out)
            if not _alive(device):
                break
    return results


def _device(name: str) -> torch.device:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("", "cpu", found):
        raise ValueError(f"device must be cpu or cuda, got {name!r}; torch finds {found} here")
    return torch.device(name or found)


def select(options: Options, device: torch.device) -> list[Implementation]:
    """The implementations that the options ask for."""
    found = [
        *ours.implementations(options.bench, device.type),
        *peers.implementations(options.bench, device.type),
    ]
    wanted = [name.lower() for name in options.impls]
    return [x for x in found if not wanted or any(name in x.name.lower() for name in wanted)]


def run_case(
    case: Case,
    implementations: Sequence[Implementation],
    device: torch.device,
    ceilings: Ceilings,
    advance: Advance,
) -> list[Row]:
    """All implementations in one case, on the same inputs."""
    inputs = make_inputs(case, device)
    expected = expected_of(inputs)
    rows: list[Row] = []
    for implementation in implementations:
        advance(f"{case.name}: {implementation.name}")
        row = _measure(implementation, inputs, expected, device)
        if row.us is not None:
            rate = inputs.case.work / row.us / (1e6 if row.unit == "TFLOP/s" else 1e3)
            percent = ceilings.percent(rate, row.unit)
            row = replace(row, rate=rate, percent_of_ceiling=percent)
        rows.append(row)
    return with_ratios(rows)


def _measure(
    implementation: Implementation, inputs: Inputs, expected: Expected, device: torch.device
) -> Row:
    case = inputs.case
    try:
        prepared = implementation.prepare(inputs)
        with prepared.context():
            return _measure_prepared(
                prepared, blank_row(case, implementation, "ok"), expected, device
            )
    except UnavailableError as reason:
        return blank_row(case, implementation, "unavailable", str(reason))
    except Exception as failure:
        first_line = (str(failure).splitlines() or [""])[0]
        note = f"{type(failure).__name__}: {first_line}"
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
    """Whether the device still answers; after a fault no later number would be one."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True
