"""Drawn calls beside FlashAttention-3, cuDNN and FlashMLA: the distribution of ratios by kind.

    ANABRANCH_PEERS=SITE python benchmarks/drawn_calls.py --seed 7 --count 120 --out FILE

SITE is a folder with vLLM's builds of FlashAttention-3 and FlashMLA. Kernels of all calls are
compiled first, in processes side by side. Every implementation of a call is captured in a CUDA
graph; graphs are replayed in turns of random order, and what ours wrote is compared with what the
fastest peer wrote, row by row. A ratio is the fastest peer's time divided by ours.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from attention_bench.peers.site import find_library, has_folder
from drawn_shapes import KINDS, DrawnCall, by_kind, draw_calls
from hopper import index, interleaved, values
from rows import header, save_rows

import anabranch as ab
from anabranch.keys import KeySource

COLD_BYTES = 200 << 20  # that the copies of the inputs hold together, so that none is in the cache
PROCESSES = 15
MOST_ERROR = 0.05  # of a row, beside another implementation in 16 bits
Call = Callable[[], torch.Tensor]


class DrawnInputs:
    """Queries and keys of a call, several times, and lengths on the device."""

    def __init__(self, call: DrawnCall, copies: int) -> None:
        self.call = call
        self.starts_q = index([*accumulate(call.q_lens, initial=0)])
        self.seq_lens = index(call.k_lens)
        self.copies = [(self.queries(), self.keys()) for _ in range(copies)]

    def queries(self) -> torch.Tensor:
        return values(sum(self.call.q_lens), self.call.heads[0], self.call.model.dims[0])

    def keys(self) -> KeySource:
        """Packed keys, pages in any order, or latent rows in pages."""
        call, dims, page = self.call, self.call.model.dims, self.call.page_size
        if not page:
            k, v = (values(sum(call.k_lens), call.heads[1], dim) for dim in dims)
            return ab.RaggedKV(k, v, index([*accumulate(call.k_lens, initial=0)]))
        pages = [-(-length // page) for length in call.k_lens]
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        order = torch.randperm(sum(pages), dtype=torch.int32, device="cuda")
        for seq, some in enumerate(order.split(pages)):
            table[seq, : len(some)] = some
        if call.kind == "latent":
            return ab.LatentKV(values(sum(pages), page, dims[0]), table, self.seq_lens, dims[1])
        k, v = (values(sum(pages), page, call.heads[1], dim) for dim in dims)
        return ab.PagedKV(k, v, table, self.seq_lens)


def ours(inputs: DrawnInputs) -> list[Call]:
    """As an engine calls it, with a plan made beforehand and no hint on lengths."""
    call, calls = inputs.call, list[Call]()
    rules: dict[str, Any] = {"cu_seqlens_q": inputs.starts_q, "window": call.window}
    rules["causal"] = call.causal
    cap = {} if call.model.softcap is None else {"softcap": call.model.softcap}
    for q, keys in inputs.copies:
        plan = ab.make_plan(q, keys, **rules)
        calls.append(lambda q=q, k=keys, p=plan: ab.attend(q, k, plan=p, **rules, **cap).out)
    return calls


def flash_attention(inputs: DrawnInputs) -> list[Call]:
    """vLLM's build, which chooses its own splits."""
    call, run = inputs.call, torch.ops._vllm_fa3_C.fwd
    given = {argument.name: None for argument in run.default._schema.arguments}
    given |= {
        "cu_seqlens_q": inputs.starts_q,
        "max_seqlen_q": max(call.q_lens),
        "max_seqlen_k": max(call.k_lens),
        "softmax_scale": call.model.dims[0] ** -0.5,
        "is_causal": call.causal,
        "window_size_left": -1 if call.window is None else call.window - 1,
        "window_size_right": -1 if call.window is None else 0,
        "softcap": call.model.softcap or 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0 if call.page_size else 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    calls = list[Call]()
    for q, keys in inputs.copies:
        own = given | {"q": q, "k": keys.k, "v": keys.v}
        if call.page_size:
            own |= {"seqused_k": inputs.seq_lens, "page_table": keys.page_table}
        else:
            own |= {"cu_seqlens_k": inputs.starts_q}
        calls.append(lambda own=own: run(**own)[0])
    return calls


def cudnn(inputs: DrawnInputs) -> list[Call]:
    """torch's SDPA on cuDNN, for prompts of one length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = inputs.call
    shape = (len(call.q_lens), call.q_lens[0])

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                *qkv, is_causal=call.causal, enable_gqa=call.heads[0] != call.heads[1]
            )
        return out.transpose(1, 2).flatten(0, 1)

    padded = [
        [x.unflatten(0, shape).transpose(1, 2) for x in (q, keys.k, keys.v)]
        for q, keys in inputs.copies
    ]
    return [lambda qkv=qkv: attend(*qkv) for qkv in padded]


def flashmla(inputs: DrawnInputs) -> list[Call]:
    """FlashMLA's dense decode, with a division of work made beforehand."""
    call, run, calls = inputs.call, torch.ops._flashmla_C.dense_decode_fwd, list[Call]()
    dim_k, dim_v = call.model.dims
    for q, keys in inputs.copies:
        q = q.view(len(call.q_lens), -1, *q.shape[1:])  # noqa: PLW2901
        cache = keys.cache.unsqueeze(2)
        given = (q, cache, dim_v, inputs.seq_lens, keys.page_table, dim_k**-0.5, True)
        _, _, *division = run(*given, None, None, None)
        calls.append(lambda given=given, division=division: run(*given, *division, None)[0])
    return calls


def peers_of(call: DrawnCall) -> dict[str, Callable[[DrawnInputs], list[Call]]]:
    """Those that can run a call."""
    if call.kind == "latent":
        return {"FlashMLA": flashmla}
    found = {"FA3": flash_attention}
    is_even = not call.page_size and len(set(call.q_lens)) == 1
    if is_even and call.window is None and call.model.softcap is None:
        found["cuDNN"] = cudnn
    return found


def measure(call: DrawnCall) -> dict[str, object]:
    """Time a call beside its peers, and compare what they wrote."""
    inputs = DrawnInputs(call, max(1, min(4, -(-COLD_BYTES // call.kv_bytes))))
    makers = {"anabranch": ours} | (peers_of(call) if has_folder() else {})
    calls = {name: make(inputs) for name, make in makers.items()}
    times = interleaved(calls)
    row: dict[str, object] = {"kind": call.kind, "case": call.name}
    row |= {name: round(us, 2) for name, us in times.items()}
    peers = {name: us for name, us in times.items() if name != "anabranch"}
    if peers:
        best = min(peers, key=lambda name: peers[name])
        row["ratio"] = round(peers[best] / times["anabranch"], 3)
        row["error"] = round(worst_row(calls["anabranch"], calls[best]), 4)
    return row


def worst_row(mine: list[Call], theirs: list[Call]) -> float:
    """The largest relative difference of a row."""
    worst = 0.0
    for first, second in zip(mine, theirs, strict=True):
        x, y = (call().float().flatten(0, -2) for call in (first, second))
        worst = max(worst, ((x - y).norm(dim=1) / (y.norm(dim=1) + 1e-3)).max().item())
    return worst


def compile_share(calls: list[DrawnCall], share: int) -> None:
    """One run of every so-manieth call, so that its kernels are on the disk."""
    for call in calls[share::PROCESSES]:
        ours(DrawnInputs(call, 1))[0]()
        torch.cuda.empty_cache()
    torch.cuda.synchronize()


def main() -> int:
    """Draw, compile, time, print and write; 1 if a row differs from the peer's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--kind", choices=KINDS, help="calls of one kind alone")
    parser.add_argument("--seconds", type=float, default=400, help="begin no call after this long")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    calls = draw_calls(options.seed, options.count, (options.kind,) if options.kind else KINDS)
    if options.share is not None:
        compile_share(calls, options.share)
        return 0
    start = time.perf_counter()
    command = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*command, "--share", str(i)]) for i in range(PROCESSES)]
    for process in running:
        process.wait()
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    if has_folder():
        for library in ("_vllm_fa3_C.abi3.so", "_flashmla_C.abi3.so"):
            torch.ops.load_library(str(find_library(library)))
    rows: list[dict[str, object]] = []
    for call in calls:
        if time.perf_counter() - start > options.seconds:
            print("out of time before", call.name)
            break
        rows.append(measure(call))
        print(" | ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        torch.cuda.empty_cache()
    save_rows(options.out, header() | {"seed": options.seed}, rows)
    for each in by_kind([row for row in rows if "ratio" in row]):
        print(
            f"{each.kind:8} {each.count:4} calls  median {each.median:.3f}  "
            f"worst twentieth {each.worst_twentieth:.3f}  worst {each.worst:.3f}"
        )
    wrong = [row["case"] for row in rows if not row.get("error", 0.0) < MOST_ERROR]
    print("rows that differ from the peer's:", ", ".join(map(str, wrong)) or "none")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
