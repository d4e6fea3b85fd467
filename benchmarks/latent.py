"""Latent decode beside FlashMLA, by CUDA-graph replay.

    ANABRANCH_PEERS=SITE python benchmarks/latent.py   # SITE holds vLLM's _flashmla_C.abi3.so
    python benchmarks/latent.py --tune                 # other tiles too
    python benchmarks/latent.py --out FILE             # also write the rows, and what they hold for

Implementations of a case take turns, so that clocks and temperature are the same for all. Each is
checked against float32 on one sequence before it is timed. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from attention_bench.peers.site import find_library, has_folder
from attention_bench.timing import event_us
from rows import header, print_rows, save_rows

import anabranch as ab
from anabranch.device import capability
from anabranch.kernels.config import AttendConfig
from anabranch.kernels.gluon.latent_config import LatentTiles
from anabranch.keys import KeySource

ROUNDS = 9
COLD_BYTES = 256 << 20  # that the calls of one replay read, so that nothing stays in the L2 cache
DIM_K, DIM_V, PAGE = 576, 512, 64
BRAIN, CUDA = torch.bfloat16, torch.device("cuda")
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class LatentCase:
    """Decode or verify with DeepSeek's widths."""

    num_seqs: int
    num_heads: int
    length: int
    q_len: int = 1

    @property
    def name(self) -> str:
        """Sequences, heads, keys and new tokens."""
        return f"B{self.num_seqs} H{self.num_heads} L{self.length} q{self.q_len}"

    @property
    def cache_bytes(self) -> int:
        return self.num_seqs * self.length * DIM_K * 2


LATENT = [
    LatentCase(64, 16, 8192),
    LatentCase(16, 128, 8192),
    LatentCase(128, 128, 4096),
    LatentCase(66, 128, 8192),
    LatentCase(1, 128, 8192),
    LatentCase(16, 128, 8192, q_len=2),
]
TILES = {
    16: [
        AttendConfig(16, 32, 4, 3, 2, keys_first=True, merge_batch=4, whole_rows=2048),
        AttendConfig(16, 32, 4, 3, 2, lazy_peak=True, merge_batch=4, whole_rows=2048),
        AttendConfig(16, 64, 4, 2, 1, merge_batch=4, whole_rows=2048),
    ],
    64: [
        AttendConfig(64, 64, 8, 2, 1, merge_rows=16, merge_batch=4, whole_rows=2048),
        AttendConfig(64, 32, 8, 3, 1, merge_rows=16, merge_batch=4, whole_rows=2048),
        AttendConfig(32, 32, 8, 3, 1, keys_first=True, merge_batch=4, whole_rows=2048),
    ],
}
LATENT_TILES = [
    LatentTiles(least_share=2),
    LatentTiles(least_share=8),
    LatentTiles(aligned_growth=0),
]


def planned(
    q: torch.Tensor, keys: KeySource, config: object | None = None, impl: str | None = None
) -> Call:
    """A call that reuses a plan, as the layers of a step do."""
    plan = ab.make_plan(q, keys, config=config, impl=impl)
    return lambda: ab.attend(q, keys, plan=plan).out


def latent_calls(case: LatentCase, tune: bool, peer: bool) -> dict[str, list[Call]]:
    """Rotations of every implementation over caches of their own."""
    rotations = max(1, -(-COLD_BYTES // case.cache_bytes))
    calls: dict[str, list[Call]] = {}
    pages_each = case.length // PAGE
    for _ in range(rotations):
        num_pages = case.num_seqs * pages_each
        cache = torch.randn(num_pages, PAGE, DIM_K, dtype=BRAIN, device=CUDA)
        table = torch.randperm(num_pages, device=CUDA).int().view(case.num_seqs, pages_each)
        lengths = torch.full((case.num_seqs,), case.length, dtype=torch.int32, device=CUDA)
        keys = ab.LatentKV(cache, table, lengths, DIM_V)
        shape = (case.num_seqs, case.q_len, case.num_heads, DIM_K)
        q = torch.randn(shape, dtype=BRAIN, device=CUDA)
        for impl in implementations():
            calls.setdefault(f"anabranch {impl}", []).append(planned(q, keys, impl=impl))
        for tiles in LATENT_TILES if tune and "gluon" in implementations() else ():
            name = f"gluon, {tiles.least_share} tiles at least, {tiles.aligned_growth}% growth"
            calls.setdefault(name, []).append(planned(q, keys, tiles, "gluon"))
        for config in tiles_of(case) if tune else ():
            name = f"{config.block_m} x {config.block_n}, {config.num_warps} warps, "
            name += f"{config.num_stages} stages{', keys first' if config.keys_first else ''}"
            name += ", lazy peak" if config.lazy_peak else ""
            calls.setdefault(name, []).append(planned(q, keys, config, "triton"))
        if peer:
            calls.setdefault("FlashMLA", []).append(flashmla(q, cache, lengths, table))
        check(calls, keys, q)
    return calls


def implementations() -> list[str]:
    """Producers that this GPU has."""
    return ["gluon", "triton"] if capability(torch.device("cuda", 0))[0] == 9 else ["triton"]


def tiles_of(case: LatentCase) -> list[AttendConfig]:
    """What could be selected in the place of what is."""
    return TILES[16 if case.num_heads * case.q_len <= 16 else 64]


def flashmla(
    q: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
) -> Call:
    """FlashMLA's dense decode; its division of work is made once and reused, as ours is."""
    given = (q, cache.unsqueeze(2), DIM_V, lengths, table, DIM_K**-0.5, True)
    run = torch.ops._flashmla_C.dense_decode_fwd
    _, _, *division = run(*given, None, None, None)
    return lambda: run(*given, *division, None)[0]


def check(
    calls: dict[str, list[Call]], keys: KeySource, q: torch.Tensor, most: float = 0.01
) -> None:
    """The first sequence against float32, for the rotation that was made last."""
    k, v = (x.float() for x in keys.gather(0))
    group = q.shape[2] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[0].float(), k) * q.shape[-1] ** -0.5
    q_len, k_len = q.shape[1], len(k)
    late = torch.ones(q_len, k_len, dtype=torch.bool, device=CUDA).triu(k_len - q_len + 1)
    weights = scores.masked_fill(late, -torch.inf).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, v)
    for name, rotations in calls.items():
        out = rotations[-1]().view(*q.shape[:3], -1)[0].float()
        error = ((out - exact).norm() / exact.norm()).item()
        if not error < most:
            raise RuntimeError(f"{name} is wrong: relative error {error:.4f}")


def time_in_turn(calls: dict[str, list[Call]]) -> dict[str, float]:
    """Microseconds a call, medians of rounds in which every implementation has its turn."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, rotations in calls.items():
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in rotations * (2 if len(rotations) > 1 else 4):
                call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, graph in graphs.items():
            count = len(calls[name]) * (2 if len(calls[name]) > 1 else 4)
            samples[name].append(event_us([graph.replay])[0] / count)
    return {name: median(times[1:]) for name, times in samples.items()}


def rows(tune: bool, peer: bool) -> Iterator[dict[str, object]]:
    """A row for each implementation of each case."""
    for case in LATENT:
        times = time_in_turn(latent_calls(case, tune, peer))
        flops = 2 * case.num_seqs * case.q_len * case.num_heads * case.length * (DIM_K + DIM_V)
        for name, us in times.items():
            yield {
                "case": case.name, "implementation": name, "us": round(us, 1),
                "tflops": round(flops / us / 1e6),
                "tb_per_s": round(case.cache_bytes / us / 1e6, 2),
                "ratio": round(times["FlashMLA"] / us, 3) if peer else None,
            }  # fmt: skip
        torch.cuda.empty_cache()


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="also time other tiles")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if has_folder():
        torch.ops.load_library(str(find_library("_flashmla_C.abi3.so")))
    print(json.dumps(header("decode")))
    save_rows(options.out, header("decode"), print_rows(rows(options.tune, has_folder())))


if __name__ == "__main__":
    main()
