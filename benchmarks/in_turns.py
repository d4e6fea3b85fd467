"""Two environments, such as two commits or two Tritons, timed in turns on one GPU.

    python benchmarks/in_turns.py --before PATH[:PATH] --after PATH[:PATH] --out in_turns.json

Each side is a process whose PYTHONPATH begins with the folders that are given: a checkout of this
package, or a folder with another Triton before it. Kernels of both are compiled first, by several
processes. Both hold every call as a CUDA graph; they are replayed in random turns, so that neither
has a warmer machine; speeds are medians of the ratios of a turn. `--choices` adds sides like the
second with choices of `kernels/versions.py` changed (`CHOICES`), and `--cases` names those to be
timed. Where ANABRANCH_PEERS names a folder with vLLM's builds of FlashAttention-3 and FlashMLA,
these are a side of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from zlib import crc32

import torch

HEADS, KV_HEADS, PAGE, TURNS = 32, 8, 16, 25
TURN_US = 4000  # of a turn: a long one lowers the clock for the sides that follow
CHOICE = "ANABRANCH_IN_TURNS_CHOICE"
# Letters of a choice, and what is set in `kernels/versions.py`: columns of queries of prompts in
# registers, all or half, also of blocks that may be cut, none of 256; what is rewritten in PTX of
# whole blocks, of those that may be cut, of codes and of latent rows; 16 rows over Q8_0 pages.
CHOICES = {
    "r": ("versions", "QUERY_COLUMNS", 128),
    "h": ("versions", "QUERY_COLUMNS", 64),
    "d": ("versions", "CUT_QUERY_COLUMNS", 128),
    "c": ("versions", "CUT_QUERY_COLUMNS", 64),
    "x": ("versions", "WIDE_QUERY_COLUMNS", 0),
    "o": ("versions", "PROMPT_OPTIONS", "AS_WRITTEN"),
    "w": ("versions", "PROMPT_OPTIONS", "WHOLE_DESCRIPTORS"),
    "O": ("versions", "CUT_OPTIONS", "AS_WRITTEN"),
    "M": ("versions", "CUT_OPTIONS", "NO_COPIES"),
    "k": ("versions", "CODE_OPTIONS", "WHOLE_DESCRIPTORS"),
    "l": ("versions", "LATENT_OPTIONS", "WHOLE_DESCRIPTORS"),
    "q": ("triton.plan", "CODE_ROWS", 16),
}
OLDER_PTXAS = "p"  # the letter for Hopper's kernels assembled as Triton does those of older GPUs
PEER = "peer"  # the choice that is another library
Shape = dict[str, Any]
# lens: keys of each sequence; new: queries of each; heads, dims, format and rules where not usual
CASES: dict[str, Shape] = {
    "decode 1 x 8192": {"lens": [8192], "new": [1]},
    "decode 8 x 8192": {"lens": [8192] * 8, "new": [1] * 8},
    "decode 64 x 4096": {"lens": [4096] * 64, "new": [1] * 64},
    "decode 128 x 1024": {"lens": [1024] * 128, "new": [1] * 128},
    "decode 32 x 4096, 64 dims": {"lens": [4096] * 32, "new": [1] * 32, "dims": (64, 64)},
    "decode 64 x 4096, invariant": {"lens": [4096] * 64, "new": [1] * 64, "fixed": True},
    "verify 4 of 8 x 8192": {"lens": [8192] * 8, "new": [4] * 8},
    "verify 5 of 64 x 4096": {"lens": [4096] * 64, "new": [5] * 64},
    "prompt 1 x 256": {"lens": [256], "new": [256]},
    "prompt 1 x 1024": {"lens": [1024], "new": [1024]},
    "prompt 1 x 8192": {"lens": [8192], "new": [8192]},
    "prompt 4 x 4096": {"lens": [4096] * 4, "new": [4096] * 4},
    "prompt 1 x 4096, 256 dims": {"lens": [4096], "new": [4096], "dims": (256, 256)},
    "prompt 1 x 4096, softcap": {"lens": [4096], "new": [4096], "softcap": 50.0},
    "prompt 1 x 8192, window": {"lens": [8192], "new": [8192], "window": 128, "dims": (64, 64)},
    "chunk 512 at 32768": {"lens": [32768], "new": [512]},
    "chunk 512 and 31 decodes": {"lens": [8192] + [4096] * 31, "new": [512] + [1] * 31},
    "fp8 decode 64 x 4096": {"lens": [4096] * 64, "new": [1] * 64, "format": "fp8"},
    "int8 decode 64 x 4096": {"lens": [4096] * 64, "new": [1] * 64, "format": "int8"},
    "q8_0 decode 64 x 4096": {"lens": [4096] * 64, "new": [1] * 64, "format": "q8_0"},
    "latent 16 x 8192, 128 heads": {"lens": [8192] * 16, "new": [1] * 16, "latent": 128},
    "latent 64 x 8192, 16 heads": {"lens": [8192] * 64, "new": [1] * 64, "latent": 16},
    "latent 1 x 8192, 128 heads": {"lens": [8192], "new": [1], "latent": 128},
    "merge 16384 x 32 x 128": {"merge": 16384},
    "merge 256 x 32 x 128": {"merge": 256},
}


def call_of(shape: Shape) -> Callable[[], object]:
    import anabranch as ab

    draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    if rows := shape.get("merge"):
        a, b = (
            ab.AttentionState(draw(rows, HEADS, 128), draw(rows, HEADS).float()) for _ in range(2)
        )
        return lambda: ab.merge(a, b)
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
    lens, new = shape["lens"], shape["new"]
    dims = shape.get("dims", (128, 128))
    counts = [-(-length // PAGE) for length in lens]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    order, used = torch.randperm(sum(counts)).int(), 0
    for row, count in enumerate(counts):
        table[row, :count] = order[used : used + count]
        used += count
    where = (table.cuda(), ints(lens))
    if heads := shape.get("latent"):
        q, keys = draw(sum(new), heads, 576), ab.LatentKV(draw(used, PAGE, 576), *where, 512)
    else:
        q, keys = draw(sum(new), HEADS, dims[0]), pages_of(shape, used, dims, where, draw)
    starts = ints([0, *torch.tensor(new).cumsum(0).tolist()])
    options = {name: shape[name] for name in ("window", "softcap") if name in shape}
    planned = {name: value for name, value in options.items() if name == "window"}
    plan = ab.make_plan(
        q, keys, cu_seqlens_q=starts, batch_invariant=shape.get("fixed", False), **planned
    )
    return lambda: ab.attend(q, keys, cu_seqlens_q=starts, plan=plan, **options)


def pages_of(shape: Shape, used: int, dims: Any, where: Any, draw: Callable[..., Any]) -> Any:
    """Keys and values in pages of a format."""
    import anabranch as ab
    from anabranch.keys.formats import empty_store

    k, v = (draw(used * PAGE, KV_HEADS, dim) for dim in dims)
    name, sizes = shape.get("format", "plain"), (used, PAGE, KV_HEADS)
    stores = [
        empty_store(name, (*sizes, dim), torch.bfloat16, torch.device("cuda")) for dim in dims
    ]
    (k_codes, k_scales), (v_codes, v_scales) = stores
    keys = ab.PagedKV(k_codes, v_codes, *where, k_scales, v_scales, torch.bfloat16)
    ab.append_kv(keys, k, v, torch.arange(used * PAGE, device="cuda"))
    return keys


def peer_call_of(shape: Shape) -> Callable[[], object]:
    """The same by FlashAttention-3, or over latent rows in pages of 64 by FlashMLA."""
    from attention_bench.peers.site import find_library
    from drawn_calls import DrawnInputs, flash_attention, flashmla
    from drawn_shapes import DrawnCall, Model

    if {"merge", "format", "fixed"} & shape.keys():
        raise ValueError("no peer does this")
    heads = shape.get("latent")
    kind, make, library = ("chunk", flash_attention, "_vllm_fa3_C")
    if heads:
        kind, make, library = ("latent", flashmla, "_flashmla_C")
    torch.ops.load_library(str(find_library(f"{library}.abi3.so")))
    dims = (576, 512) if heads else shape.get("dims", (128, 128))
    counts = (heads, 1) if heads else (HEADS, KV_HEADS)
    model = Model(kind, counts, dims, softcap=shape.get("softcap"))
    lengths = (tuple(shape["new"]), tuple(shape["lens"]))
    call = DrawnCall(kind, model, counts, *lengths, 64 if heads else PAGE, shape.get("window"))
    return make(DrawnInputs(call, 1))[0]


def compile_share(names: list[str], share: int, count: int) -> None:
    """Compile the kernels of every `count`-th case. What fails does so again where it is timed."""
    from anabranch.launches.compile_ahead import compiling_ahead

    with torch.inference_mode(), compiling_ahead():
        for name in names[share::count]:
            with suppress(Exception):
                call_of(CASES[name])()


def choose(letters: str) -> None:
    """Change choices of this process."""
    from importlib import import_module

    from triton import knobs

    if letters == PEER:
        return
    ptx = import_module("anabranch.launches.hopper_ptx")
    for module, name, value in (CHOICES[x] for x in letters if x != OLDER_PTXAS):
        chosen = getattr(ptx, value) if isinstance(value, str) else value
        setattr(import_module(f"anabranch.kernels.{module}"), name, chosen)
    if OLDER_PTXAS in letters:
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path


def serve() -> None:
    """Say which versions are here, then answer names of cases with microseconds a call."""
    import triton

    print(json.dumps({"torch": torch.__version__, "triton": triton.__version__}), flush=True)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    counts: dict[str, int] = {}  # of replays in a turn
    make = peer_call_of if os.environ[CHOICE] == PEER else call_of
    with torch.inference_mode():
        for line in sys.stdin:
            name = json.loads(line)
            try:
                if name not in graphs:
                    graphs[name] = capture(make(CASES[name]))
                    counts[name] = round(min(max(TURN_US / replay(graphs[name], 3), 4), 100))
                answer: object = replay(graphs[name], counts[name])
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(answer), flush=True)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count * 1000


class Side:
    """An environment, the processes that compile its kernels and the one that runs them."""

    def __init__(self, folders: str, choice: str, names: list[str], count: int) -> None:
        path = os.pathsep.join(filter(None, [folders, os.environ.get("PYTHONPATH")]))
        cache = Path(tempfile.gettempdir(), f"in-turns-{crc32(f'{folders}{choice}'.encode()):08x}")
        given = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), CHOICE: choice}
        self.environment, self.names = os.environ | given, names
        shares = [f"{share}/{count}" for share in range(count if choice != PEER else 0)]
        self.compilers = [self.start("--compile", share) for share in shares]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """This script in the environment."""
        command = [sys.executable, __file__, *arguments, "--cases", *self.names]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, text=True)

    def ready(self) -> float | str | dict[str, str]:
        """Wait until kernels are compiled; what is installed."""
        for process in self.compilers:
            process.communicate()
        self.process = self.start("--serve")
        return self.answer()

    def ask(self, name: str) -> None:
        """Let it replay a case."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(name) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float | str | dict[str, str]:
        """Microseconds, or what went wrong."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else "the process ended"


def rows(sides: dict[str, Side], names: list[str], seconds: float) -> Iterator[dict[str, object]]:
    """Every case; all sides compile a case at the same time, then take turns."""
    end = time.monotonic() + seconds
    for name in names:
        if time.monotonic() > end:
            return
        for side in sides.values():
            side.ask(name)
        first = {key: side.answer() for key, side in sides.items()}
        failed = {key: x for key, x in first.items() if isinstance(x, str)}
        if failed.keys() - {PEER}:
            yield {"case": name, **failed}
            continue
        times: dict[str, list[float]] = {key: [] for key in sides if key not in failed}
        for _ in range(TURNS):
            for key in random.sample(list(times), len(times)):
                sides[key].ask(name)
                times[key].append(float(sides[key].answer()))
        found = {key: round(median(each), 2) for key, each in times.items()}
        spread = {f"{key} spread": round(relative_range(x), 3) for key, x in times.items()}
        pairs = [("before", key) for key in times if key not in ("before", PEER)]
        pairs += [(PEER, key) for key in times if PEER in times and key != PEER]
        speeds = {
            f"{key}/{of}": round(median(map(truediv, times[of], times[key])), 3)
            for of, key in pairs
        }
        yield {"case": name, **found, **speeds, **spread}


def relative_range(times: list[float]) -> float:
    """Of the middle half."""
    first, _, third = quantiles(times, n=4)
    return third / first - 1


def main() -> None:
    """Measure, print, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="folders of the first side")
    parser.add_argument("--after", help="folders of the other")
    parser.add_argument("--choices", nargs="*", default=[], help="letters of CHOICES, or p")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--seconds", type=float, default=480, help="after which no case begins")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.compile:
        choose(os.environ[CHOICE])
    if options.serve:
        serve()
        return
    if options.compile:
        compile_share(options.cases, *map(int, options.compile.split("/")))
        return
    from attention_bench.peers.site import has_folder
    from rows import header, print_rows, save_rows

    folders = {"before": (options.before, ""), "after": (options.after, "")}
    folders |= {f"after {x}": (options.after, x) for x in options.choices}
    folders |= {PEER: (options.before, PEER)} if has_folder() else {}
    names, count = options.cases, max((os.cpu_count() or 2) // len(folders), 1)
    sides = {key: Side(*each, names, count) for key, each in folders.items()}
    about = header("before and after") | {key: side.ready() for key, side in sides.items()}
    found = print_rows(rows(sides, names, options.seconds))
    save_rows(options.out, about, found)
    for side in sides.values():
        side.process.kill()


if __name__ == "__main__":
    main()
