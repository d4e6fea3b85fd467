"""Attention compiled by two versions of Triton, timed on one GPU in turns.

    python benchmarks/two_tritons.py --first SITE --second SITE --out FILE [--only latent]

SITE is a folder with a Triton, or `installed`. Each version has a process and a cache of its own;
both hold a case at a time, and replay its CUDA graph one after the other, in changing order. Above
1, the second version is faster. A case whose results differ by more than rounding has no ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 9
SAMPLE_US = 3000.0
APART = 2e-2  # by which means of bfloat16 results may differ, relative to their size
Calls = list[Callable[[], Any]]


def cases() -> Iterator[tuple[str, Callable[[], Calls]]]:
    """Names, and what makes the calls of each over three copies of the inputs."""
    import torch
    from hopper import Case, Inputs, index, ours, values

    import anabranch as ab
    from anabranch.keys.formats import empty_store

    def attention(name: str, seqs: int, q_len: int, length: int, **given: Any) -> Any:
        case = Case(name, (q_len,) * seqs, (length,) * seqs, **given)
        return name, lambda: ours(Inputs(case, case.copies))[1]

    def planned(q: torch.Tensor, sources: list[Any], **given: Any) -> Calls:
        plan = ab.make_plan(q, sources[0])
        return [lambda keys=keys: ab.attend(q, keys, plan=plan, **given) for keys in sources]

    def table(seqs: int, length: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = seqs * length // page
        order = torch.randperm(pages, dtype=torch.int32, device="cuda").view(seqs, -1)
        return order, index([length] * seqs)

    def latent(seqs: int, heads: int, length: int) -> Calls:
        rows, where = seqs * length // 64, table(seqs, length, 64)
        sources = [ab.LatentKV(values(rows, 64, 576), *where, 512) for _ in range(3)]
        return planned(values(seqs, heads, 576), sources, scale=192**-0.5)

    def quantised(seqs: int, length: int, format_name: str) -> Calls:
        where, shape = table(seqs, length, 16), (seqs * length // 16, 16, 8, 128)
        sources = []
        for _ in range(3):
            device = torch.device("cuda")
            stores = [empty_store(format_name, shape, torch.bfloat16, device) for _ in "kv"]
            for _, scales in stores:  # one scale for a tensor is given, others are found by append
                if scales is not None:
                    scales.fill_(1)
            keys = ab.PagedKV(
                stores[0][0], stores[1][0], *where, stores[0][1], stores[1][1], torch.bfloat16
            )
            slots = torch.arange(shape[0] * 16, device="cuda")
            for some in slots.split(1 << 16):
                ab.append_kv(keys, *(values(len(some), 8, 128) for _ in "kv"), some)
            sources.append(keys)
        return planned(values(seqs, 32, 128), sources)

    def merge(tokens: int) -> Calls:
        def state() -> ab.AttentionState:
            return ab.AttentionState(values(tokens, 32, 128), values(tokens, 32).float())

        pairs = [(state(), state()) for _ in range(8)]
        return [lambda a=a, b=b: ab.merge(a, b, impl="triton") for a, b in pairs]

    for seqs, length in ((1, 8192), (8, 8192), (64, 1024), (64, 8192)):
        yield attention(f"decode {seqs} x {length}", seqs, 1, length, page_size=16)
    for seqs, tokens, length in ((8, 4, 8192), (64, 3, 4096), (8, 8, 1024)):
        yield attention(f"verify {tokens}, {seqs} x {length}", seqs, tokens, length, page_size=16)
    for seqs, length, dims in ((1, 8192, 128), (8, 1024, 128), (1, 8192, 64), (1, 8192, 256)):
        name = f"prefill {seqs} x {length}, {dims} dims"
        yield attention(name, seqs, length, length, dims=(dims, dims))
    yield attention("chunks 4 x 2048 of 16384", 4, 2048, 16384, page_size=16)
    yield attention("chunks 8 x 512 of 8192", 8, 512, 8192, page_size=16)
    for seqs, heads, length in ((1, 128, 8192), (64, 128, 4096), (64, 16, 8192)):
        name = f"latent {heads} heads, {seqs} x {length}"
        yield name, lambda s=seqs, h=heads, n=length: latent(s, h, n)
    for format_name in ("fp8_tensor", "fp8", "int8", "q8_0"):
        yield f"quantised {format_name}, 64 x 8192", lambda f=format_name: quantised(64, 8192, f)
    for tokens in (512, 8192):
        yield f"merge {tokens} tokens", lambda n=tokens: merge(n)


def serve(only: str) -> None:
    """Answer lines: `next` prepares a case and describes it, `time` replays it."""
    import torch
    import triton
    from hopper import capture, replay_us

    chosen = [(name, make) for name, make in cases() if only in name]
    answer({"triton": triton.__version__, "cases": [name for name, _ in chosen]})
    for name, make in chosen:
        assert sys.stdin.readline().strip() == "next"
        try:
            torch.manual_seed(0)
            calls = make()
            state = calls[0]()
            size = state.out.float().abs().mean().item()
            for call in calls:
                call()
            rounds = max(1, int(SAMPLE_US / replay_us(capture(calls, 1), 1)))
            graph = capture(calls, rounds)
        except Exception as error:  # the other version may still run it
            answer({"case": name, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        answer({"case": name, "size": size})
        while sys.stdin.readline().strip() == "time":
            answer({"us": replay_us(graph, 2) / (rounds * len(calls))})
        del calls, graph, state
        torch.cuda.empty_cache()


def answer(found: dict[str, object]) -> None:
    """A line for the process that asked."""
    print(json.dumps(found), file=sys.__stdout__, flush=True)


class Version:
    """A process with one Triton."""

    def __init__(self, site: str, only: str, cache: str) -> None:
        root = Path(__file__).parent.parent
        path = [*([] if site == "installed" else [site]), str(root), os.environ.get("PYTHONPATH")]
        given = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_CACHE_DIR": cache}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--only", only],
            env=os.environ | given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        """Its next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, question: str) -> dict[str, Any]:
        """Its answer to a question."""
        self.tell(question)
        return self.read()

    def tell(self, word: str) -> None:
        """Send a word that has no answer."""
        print(word, file=self.process.stdin, flush=True)


def compare(first: Version, second: Version) -> dict[str, object]:
    """Times of the next case in turns, and the ratio of their medians."""
    made = [version.ask("next") for version in (first, second)]
    row: dict[str, object] = {"case": made[0]["case"]}
    ready = [v for v, found in zip((first, second), made, strict=True) if "error" not in found]
    times: dict[Version, list[float]] = {version: [] for version in ready}
    for turn in range(ROUNDS if len(ready) == 2 else 0):
        for version in ready if turn % 2 else ready[::-1]:
            times[version].append(version.ask("time")["us"])
    for version in ready:
        version.tell("done")
    errors = {v.about["triton"]: x["error"] for v, x in zip((first, second), made, strict=True)
              if "error" in x}  # fmt: skip
    if errors:
        return row | {"errors": errors}
    before, after = median(times[first]), median(times[second])
    row |= {first.about["triton"]: round(before, 2), second.about["triton"]: round(after, 2)}
    sizes = [found["size"] for found in made]
    if abs(sizes[0] - sizes[1]) > APART * abs(sizes[0]):
        return row | {"errors": {"results differ": sizes}}
    return row | {"ratio": round(before / after, 3)}


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", default="installed", help="a folder with a Triton")
    parser.add_argument("--second", default="installed")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.only)
        return
    from rows import header, print_rows, save_rows

    caches = [tempfile.mkdtemp() for _ in range(2)]
    sites = (options.first, options.second)
    first, second = (Version(s, options.only, c) for s, c in zip(sites, caches, strict=True))
    rows = print_rows(compare(first, second) for _ in first.about["cases"])
    about = header() | {"triton": [first.about["triton"], second.about["triton"]]}
    save_rows(options.out, about, rows)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        print(f"{len(ratios)} of {len(rows)} cases, ratios {min(ratios)} to {max(ratios)}")


if __name__ == "__main__":
    main()
