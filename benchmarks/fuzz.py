"""Random calls of attend() against the float64 reference, with NaN in all memory beside its own.

    python benchmarks/fuzz.py --calls 1000 --impl gluon --seconds 120 --processes 12 --seed 0
    python benchmarks/fuzz.py --impl gluon --only SEED        # one call again

`--impl latent` draws calls over latent rows for the Hopper kernel, `--impl triton` runs in the
interpreter where there is no GPU. Fresh memory is NaN before a kernel writes it, also between the
replays of a graph, and so is what was freed: unused pages, ends of buffers, `out`, plans, parts.
`fuzzed_calls.py` draws the calls, `tests/support/cases.py` makes their inputs and
knows what is right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from cases import assert_right, make_inputs  # noqa: E402
from fuzzed_calls import (  # noqa: E402
    CALLS_OF_A_KIND,
    IMPLS,
    KINDS_OF_A_SEED,
    FuzzedCall,
    draw_call,
    draw_kind,
    kind_of,
)

from anabranch import AttentionState, attend, make_plan  # noqa: E402
from anabranch.kernels.hopper_config import select_tiles  # noqa: E402
from anabranch.keys import KeySource, RaggedKV  # noqa: E402

PLANNED = ("cu_seqlens_q", "causal", "window", "tree_mask")
FREED_BYTES = 256 << 20  # of large blocks that the next call's memory is cut from,
SMALL_BLOCKS = 32, 1 << 19  # and of small ones, which the allocator keeps apart
GRACE_SECONDS = 45.0  # after the last call has begun: a kernel that has not ended hangs
Record = dict[str, Any]


def poison_memory(device: str) -> None:
    """Fill fresh memory, and on a GPU what the allocator hands out next, with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    if device == "cuda":
        sizes = [FREED_BYTES] + [SMALL_BLOCKS[1]] * SMALL_BLOCKS[0]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        for block in blocks:
            block.fill_(255)  # NaN in every format, -1 as an index


def run_call(call: FuzzedCall, impl: str) -> float:
    """The largest error as a share of what is allowed; raises where a state is wrong."""
    case = call.case
    poison_memory(case.device)
    q, keys, options = make_inputs(case, call.seed)
    out, room = make_destination(call, q)
    producer = "gluon" if impl == "latent" else impl

    def run(plan: object = None) -> AttentionState:
        if call.planned and plan is None:
            plan = plan_of(call, q, keys, options, impl)
        return attend(q, keys, plan=plan, impl=producer, out=out, **options)

    plan = plan_of(call, q, keys, options, impl) if call.planned else None
    first = AttentionState(*(x.clone() for x in run(plan)))
    share = assert_right(first, q, keys, options)
    again = run(plan)  # counters must have been left as they were found
    if not all(map(torch.equal, first, again)):
        share = max(share, assert_right(again, q, keys, options))
    check_room(room, out)
    if call.replays:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state = run()
        for q_lens, k_lens in call.replays:
            set_lengths(keys, options["cu_seqlens_q"], q_lens, k_lens)
            graph.replay()
            share = max(share, assert_right(state, q, keys, options))
        check_room(room, out)
    return share


def plan_of(
    call: FuzzedCall, q: torch.Tensor, keys: KeySource, options: Record, impl: str
) -> object:
    """A plan with the tiles of the call's kind."""
    kind, dims = call.kind, call.case.dims
    given = {name: options[name] for name in PLANNED}
    if kind.tiles != "chosen" and impl == "gluon":
        given["config"] = select_tiles(*dims, few_blocks=kind.tiles == "narrow")
    if kind.tiles != "chosen" and impl == "triton":
        given["rows_per_seq"] = kind.rows
    producer = "gluon" if impl == "latent" else impl
    return make_plan(q, keys, impl=producer, batch_invariant=kind.batch_invariant, **given)


def make_destination(
    call: FuzzedCall, q: torch.Tensor
) -> tuple[AttentionState | None, torch.Tensor | None]:
    """The `out` of a call, and the memory around it; None where it makes its own."""
    if call.destination == "new":
        return None, None
    first, dim = int(call.destination != "given"), call.case.dims[1]
    room = q.new_full((*q.shape[:2], dim + 16), torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=q.device)
    return AttentionState(room[..., first : first + dim], lse), room


def check_room(room: torch.Tensor | None, out: AttentionState | None) -> None:
    """Nothing may be written beside `out`."""
    if room is None or out is None:
        return
    first = out.out.storage_offset()
    beside = torch.cat([room[..., :first], room[..., first + out.out.shape[-1] :]], -1)
    assert beside.isnan().all(), "memory beside out was written"


def set_lengths(
    keys: KeySource, starts_q: torch.Tensor, q_lens: tuple[int, ...], k_lens: tuple[int, ...]
) -> None:
    """Change the lengths of a call where they lie."""
    starts_q.copy_(torch.tensor([*accumulate(q_lens, initial=0)]))
    if isinstance(keys, RaggedKV):
        keys.cu_seqlens.copy_(torch.tensor([*accumulate(k_lens, initial=0)]))
    else:
        keys.seq_lens.copy_(torch.tensor(k_lens))


def run_seeds(impl: str, seeds: Iterable[int], device: str, deadline: float) -> Iterator[Record]:
    """A record as each call begins and ends; ends early if the device is lost or time is up."""
    for seed in seeds:
        if time.time() > deadline:
            return
        kind = draw_kind(impl, kind_of(seed), device)
        record: Record = {"seed": seed, "kind": kind.name}
        yield record
        try:
            record |= {"share": run_call(draw_call(kind, seed), impl)}
        except Exception as failure:
            text = str(failure).strip().splitlines() or [""]
            record |= {"failure": f"{type(failure).__name__}: {text[0]}"}
        yield record
        if "CUDA" in record.get("failure", ""):
            return


def call_seeds(seed: int, num_calls: int, num_kinds: int) -> list[int]:
    """The seeds of all calls: one of every kind, then the next of every kind."""
    assert num_kinds <= KINDS_OF_A_SEED and num_calls <= CALLS_OF_A_KIND * num_kinds
    return [
        (seed * KINDS_OF_A_SEED + number % num_kinds) * CALLS_OF_A_KIND + number // num_kinds
        for number in range(num_calls)
    ]


def run_processes(options: argparse.Namespace) -> list[Record]:
    """The last record of every call that has begun; kinds are spread over processes."""
    given = ["--impl", options.impl, "--seed", options.seed, "--calls", options.calls]
    given += ["--kinds", options.kinds, "--seconds", options.seconds]
    command = [sys.executable, __file__, *map(str, given), "--processes", str(options.processes)]
    stop = time.time() + options.seconds + GRACE_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(number)) for number in range(options.processes)]
        files = [path.open("w") for path in paths]
        workers = [
            subprocess.Popen([*command, "--worker", str(number)], stdout=file)
            for number, file in enumerate(files)
        ]
        for worker in workers:
            try:
                worker.wait(max(0.0, stop - time.time()))
            except subprocess.TimeoutExpired:
                worker.kill()
        records: dict[int, Record] = {}
        for path, file in zip(paths, files, strict=True):
            file.close()
            for line in path.read_text().splitlines():
                if line.startswith("{"):
                    record = json.loads(line)
                    records[record["seed"]] = record
    for record in records.values():
        if "share" not in record:
            record.setdefault("failure", "did not end")
    return [*records.values()]


def work(options: argparse.Namespace, device: str) -> None:
    """One process: every call of the kinds that are its own, a line as each begins and ends."""
    torch.set_num_threads(1)
    seeds = call_seeds(options.seed, options.calls, options.kinds)
    own = [seed for seed in seeds if kind_of(seed) % options.processes == options.worker]
    for record in run_seeds(options.impl, own, device, time.time() + options.seconds):
        print(json.dumps(record), flush=True)


def summarise(records: list[Record]) -> Record:
    """Counts by kind, the largest error, and every failure."""
    failures = [record for record in records if "failure" in record]
    return {
        "calls": len(records),
        "failures": failures,
        "largest_error": max((record.get("share", 0.0) for record in records), default=0.0),
        "kinds": dict(sorted(Counter(record["kind"] for record in records).items())),
    }


def describe(summary: Record, impl: str, seconds: float) -> str:
    """The summary for a terminal."""
    kinds = [f"{count:6} {name}" for name, count in summary["kinds"].items()]
    failures = [
        f"FAILED --impl {impl} --only {each['seed']}  {each['kind']}\n    {each['failure']}"
        for each in summary["failures"]
    ]
    total = (
        f"{summary['calls']} calls of {len(kinds)} kinds in {seconds:.0f} s: "
        f"{len(failures)} wrong, largest error {summary['largest_error']:.2f} of the tolerance"
    )
    return "\n".join([*kinds, *failures, total])


def write(path: Path, summary: Record, options: argparse.Namespace) -> None:
    """The summary and what it holds for, as JSON."""
    from rows import header

    about = {name: value for name, value in header().items() if name != "timing"}
    asked = {name: getattr(options, name) for name in ("impl", "calls", "kinds", "seed")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": about | asked, **summary}, indent=1) + "\n")


def main() -> None:
    """Read the command line, run, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--impl", choices=IMPLS, default="gluon")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--kinds", type=int, default=24, help="sets of compile-time constants")
    parser.add_argument("--seconds", type=float, default=120, help="begin no call after this long")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the seed of a single call")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore")  # of operations without a deterministic form
    if options.worker is not None:
        return work(options, device)
    start = time.time()
    if options.only is not None:
        kind = draw_kind(options.impl, kind_of(options.only), device)
        print(draw_call(kind, options.only))
        records = [*run_seeds(options.impl, [options.only], device, start + options.seconds)][-1:]
    else:
        records = run_processes(options)
    summary = summarise(records)
    print(describe(summary, options.impl, time.time() - start), flush=True)
    if options.out:
        write(options.out, summary, options)
    asked = 1 if options.only is not None else options.calls
    sys.exit(bool(summary["failures"]) or summary["calls"] < asked)


if __name__ == "__main__":
    main()
