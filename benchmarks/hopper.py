"""Prefill, chunks over pages and wide verification beside FlashAttention-3 on a Hopper GPU.

    ANABRANCH_PEERS=SITE python benchmarks/hopper.py --out benchmarks/results/hopper/h200.json

SITE is a folder with vLLM's build of FlashAttention-3 (`_vllm_fa3_C.abi3.so`). Every case is
captured in CUDA graphs, one for each implementation, which are replayed in turn, in an order that
changes: a GPU at its power limit then slows all of them alike. Kernels are compiled beforehand, in
processes side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median

import torch
from attention_bench.peers.site import find_library, has_folder
from rows import header, save_rows

import anabranch as ab

SAMPLE_US = 3000.0
ROUNDS = 9
PROCESSES = 14
Calls = list[Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """Query and key lengths, heads, dims and where keys lie."""

    name: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    page_size: int = 0  # 0 for packed keys
    copies: int = 3  # of the inputs, so that none is in the cache


def prefill(name: str, num_seqs: int, length: int, **given: object) -> Case:
    """All tokens of every sequence are new."""
    return Case(name, (length,) * num_seqs, (length,) * num_seqs, **given)


def verify(name: str, num_seqs: int, q_len: int, length: int, **given: object) -> Case:
    """A few new tokens over pages of 16."""
    return Case(name, (q_len,) * num_seqs, (length,) * num_seqs, page_size=16, **given)


CASES = [
    prefill("prefill 1 x 8192", 1, 8192),
    prefill("prefill 1 x 8192, pages of 16", 1, 8192, page_size=16),
    prefill("prefill 4 x 4096", 4, 4096),
    prefill("prefill 4 x 4096, pages of 16", 4, 4096, page_size=16),
    prefill("prefill 1 x 16384", 1, 16384, copies=2),
    prefill("prefill 2 x 2048", 2, 2048, copies=6),
    prefill("prefill 2 x 2048, pages of 16", 2, 2048, page_size=16, copies=6),
    prefill("prefill 1 x 1024", 1, 1024, copies=20),
    prefill("prefill 16 x 512", 16, 512, copies=6),
    Case("chunk of 2048 over 32768", (2048,), (32768,), page_size=16, copies=2),
    Case("chunk of 512 over 131072", (512,), (131072,), page_size=16, copies=2),
    Case(
        "chunk of 2048 at 8192, 31 decodes at 4096",
        (2048,) + (1,) * 31,
        (8192,) + (4096,) * 31,
        page_size=16,
    ),
    verify("verify 8 queries, 1 x 32768", 1, 8, 32768, copies=6),
    verify("verify 16 queries, 8 x 8192", 8, 16, 8192, copies=4),
    verify("verify 32 queries, 8 x 4096", 8, 32, 4096, copies=6),
    verify("decode 32/1 heads, 32 x 8192", 32, 1, 8192, heads=(32, 1), copies=4),
    verify("decode 1 x 8192", 1, 1, 8192, copies=20),
    verify("decode 8 x 8192", 8, 1, 8192, copies=4),
    verify("decode 64 x 4096", 64, 1, 4096, copies=2),
    verify("verify 4 queries, 64 x 4096", 64, 4, 4096, copies=2),
    prefill("192/128, 16 heads, 1 x 8192", 1, 8192, heads=(16, 16), dims=(192, 128)),
    prefill("192/128, 16 heads, 1 x 2048", 1, 2048, heads=(16, 16), dims=(192, 128), copies=6),
    prefill("192/128, 128 heads, 1 x 4096", 1, 4096, heads=(128, 128), dims=(192, 128), copies=2),
    prefill("256, 1 x 8192", 1, 8192, dims=(256, 256), copies=2),
    prefill("256, 1 x 8192, pages of 16", 1, 8192, dims=(256, 256), page_size=16, copies=2),
    prefill("64, 64/16 heads, 8 x 1024", 8, 1024, heads=(64, 16), dims=(64, 64), copies=4),
    prefill("96, 32/32 heads, 4 x 2048", 4, 2048, heads=(32, 32), dims=(96, 96)),
    prefill("80, 32/32 heads, 4 x 2048", 4, 2048, heads=(32, 32), dims=(80, 80)),
]


class Inputs:
    """Queries and keys of a case, several times, and lengths on the device."""

    def __init__(self, case: Case, copies: int) -> None:
        self.case = case
        self.starts_q = index([*accumulate(case.q_lens, initial=0)])
        self.starts_k = index([*accumulate(case.k_lens, initial=0)])
        self.seq_lens = index(case.k_lens)
        self.calls = [(self.queries(), self.keys()) for _ in range(copies)]

    def queries(self) -> torch.Tensor:
        return values(sum(self.case.q_lens), self.case.heads[0], self.case.dims[0])

    def keys(self) -> ab.PagedKV | ab.RaggedKV:
        """New keys and values, packed or in pages in any order."""
        case = self.case
        if not case.page_size:
            k, v = (values(sum(case.k_lens), case.heads[1], dim) for dim in case.dims)
            return ab.RaggedKV(k, v, self.starts_k)
        pages = [-(-length // case.page_size) for length in case.k_lens]
        order = torch.randperm(sum(pages), dtype=torch.int32, device="cuda")
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        for seq, some in enumerate(order.split(pages)):
            table[seq, : len(some)] = some
        k, v = (values(sum(pages), case.page_size, case.heads[1], dim) for dim in case.dims)
        return ab.PagedKV(k, v, table, self.seq_lens)


def index(lengths: object) -> torch.Tensor:
    """Lengths or starts, on the GPU."""
    return torch.tensor(lengths, dtype=torch.int32, device="cuda")


def values(*shape: int) -> torch.Tensor:
    """Random numbers, on the GPU."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def ours(inputs: Inputs) -> tuple[str, Calls]:
    """The producer that `attend` chooses, and its calls with a plan made beforehand."""
    plan = ab.make_plan(*inputs.calls[0], cu_seqlens_q=inputs.starts_q)
    given = {"cu_seqlens_q": inputs.starts_q, "plan": plan}
    name = getattr(plan, "impl", "triton")
    return name, [lambda q=q, k=k: ab.attend(q, k, **given) for q, k in inputs.calls]


def flash_attention(inputs: Inputs, code_scale: float | None = None) -> Calls:
    """vLLM's varlen build, with the schedule that an engine makes once a step.

    With a scale, queries, keys and values are codes of it.
    """
    operators, case = torch.ops._vllm_fa3_C, inputs.case
    (q_len, k_len), page = (max(case.q_lens), max(case.k_lens)), case.page_size
    plan, scales = None, [None] * 3
    if code_scale is not None:
        scales = [torch.full((len(case.q_lens), case.heads[1]), code_scale, device="cuda")] * 3
    if page:
        plan = operators.get_scheduler_metadata(
            len(case.q_lens), q_len, k_len, *case.heads, *case.dims, inputs.calls[0][0].dtype,
            inputs.seq_lens, inputs.starts_q, None, None, None, None, page, 0, True, -1, -1, False,
            0, None, 0,
        )  # fmt: skip

    def call(q: torch.Tensor, keys: ab.PagedKV | ab.RaggedKV) -> object:
        return operators.fwd(
            q, keys.k, keys.v, None, None, None, None, inputs.starts_q,
            None if page else inputs.starts_k, None, None, inputs.seq_lens if page else None, q_len,
            k_len, keys.page_table if page else None, *(None,) * 5, *scales, case.dims[0] ** -0.5,
            True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip

    return [lambda q=q, k=k: call(q, k) for q, k in inputs.calls]


def cudnn(inputs: Inputs) -> Calls:
    """torch's SDPA on cuDNN, for equal lengths and packed keys."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = inputs.case
    shape = (len(case.q_lens), case.q_lens[0])

    def call(*qkv: torch.Tensor) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *qkv, is_causal=True, enable_gqa=case.heads[0] != case.heads[1]
            )

    padded = [
        [x.unflatten(0, shape).transpose(1, 2) for x in (q, keys.k, keys.v)]
        for q, keys in inputs.calls
    ]
    return [lambda qkv=qkv: call(*qkv) for qkv in padded]


def capture(calls: Calls, rounds: int) -> torch.cuda.CUDAGraph:
    """A graph of several rounds of calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of one replay, after one to warm up."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000 / count


def interleaved(candidates: dict[str, Calls]) -> dict[str, float]:
    """Microseconds a call: medians over rounds in which each has its turn, in a random order."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, calls in candidates.items():
        for call in calls:
            call()
        torch.cuda.synchronize()
        rounds = max(1, int(SAMPLE_US / replay_us(capture(calls, 1), 1)))
        graphs[name] = capture(calls, rounds), rounds * len(calls)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    turns, shuffled = list(graphs), Random(0)
    for _ in range(ROUNDS):
        # near its power limit, a GPU is faster after a kernel that was slow
        shuffled.shuffle(turns)
        for name in turns:
            graph, count = graphs[name]
            samples[name].append(replay_us(graph, 2) / count)
    return {name: median(times) for name, times in samples.items()}


def measure(case: Case) -> dict[str, object]:
    """Time a case beside the peers that can run it."""
    inputs = Inputs(case, case.copies)
    producer, calls = ours(inputs)
    candidates = {"anabranch": calls}
    if has_folder():
        candidates["FA3"] = flash_attention(inputs)
    if not case.page_size and len(set(case.dims)) == 1:
        candidates["cuDNN"] = cudnn(inputs)
    times = interleaved(candidates)
    peers = {name: us for name, us in times.items() if name != "anabranch"}
    row: dict[str, object] = {"case": case.name, "producer": producer}
    row |= {name: round(us, 2) for name, us in times.items()}
    if peers:
        row["ratio"] = round(min(peers.values()) / times["anabranch"], 3)
    return row


def compile_all(cases: list[Case]) -> float:
    """Compile the kernels of all cases, a process each; seconds."""
    start = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    for case in cases:
        while sum(process.poll() is None for process in running) >= PROCESSES:
            time.sleep(0.05)
        running.append(subprocess.Popen([sys.executable, __file__, "--compile", case.name]))
    for process in running:
        process.wait()
    return time.perf_counter() - start


def main() -> None:
    """Read the command line, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=300, help="begin no case after this long")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        case = next(case for case in CASES if case.name == options.compile)
        ours(Inputs(case, 1))[1][0]()
        torch.cuda.synchronize()
        return
    if has_folder():
        torch.ops.load_library(str(find_library("_vllm_fa3_C.abi3.so")))
    cases = [case for case in CASES if options.only in case.name]
    print(f"compiled in {compile_all(cases):.0f} s", flush=True)
    rows: list[dict[str, object]] = []
    start = time.perf_counter()
    for case in cases:
        if time.perf_counter() - start > options.seconds:
            print("out of time before", case.name)
            break
        rows.append(measure(case))
        print(" | ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        torch.cuda.empty_cache()
    save_rows(options.out, header(), rows)


if __name__ == "__main__":
    main()
