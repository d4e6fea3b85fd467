"""Decode over quantised caches beside a bfloat16 one, and beside peers' fp8 caches.

    python benchmarks/formats.py                        # every format of this package
    ANABRANCH_PEERS=SITE python benchmarks/formats.py   # also FlashAttention-3 and FlashInfer
    python benchmarks/formats.py --tune                 # other tiles too

SITE holds vLLM's _vllm_fa3_C.abi3.so and, unpacked, FlashInfer, which compiles itself for half a
minute. Implementations take turns, and each is checked against float32 before it is timed. With an
fp8 cache vLLM quantises queries too, as FlashAttention-3 asks; that is not part of its time here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from attention_bench.peers.site import add_folder, find_library, has_folder
from latent import BRAIN, CUDA, Call, check, planned, time_in_turn
from rows import header, print_rows, save_rows

import anabranch as ab
from anabranch.kernels.config import AttendConfig
from anabranch.keys.formats import FORMATS, empty_store

NUM_SEQS, LENGTH, PAGE, HEADS, KV_HEADS, DIM = 64, 8192, 16, 32, 8, 128
FP8, FP8_SCALE = torch.float8_e4m3fn, 0.02
FP8_QUERIES_ERROR = 0.05  # relative: queries and weights have 8 bits too
WORKSPACE_BYTES = 256 << 20
TILES = [
    AttendConfig(16, 64, 4, 3, 4, keys_first=True, max_registers=128),
    AttendConfig(16, 64, 4, 4, 3, keys_first=True, max_registers=168),
    AttendConfig(16, 128, 4, 3, 2, keys_first=True),
]


class Caches:
    """The same random keys in every format, in pages in any order."""

    def __init__(self) -> None:
        self.num_pages = NUM_SEQS * LENGTH // PAGE
        self.table = torch.randperm(self.num_pages, device=CUDA).int().view(NUM_SEQS, -1)
        self.lengths = torch.full((NUM_SEQS,), LENGTH, dtype=torch.int32, device=CUDA)
        self.new = torch.randn(NUM_SEQS * LENGTH, KV_HEADS, DIM, dtype=BRAIN, device=CUDA)
        self.q = torch.randn(NUM_SEQS, HEADS, DIM, dtype=BRAIN, device=CUDA)

    def keys(self, name: str) -> ab.PagedKV:
        shape = (self.num_pages, PAGE, KV_HEADS, DIM)
        (k, k_scales), (v, v_scales) = (empty_store(name, shape, BRAIN, CUDA) for _ in range(2))
        if name == "fp8_tensor":
            k_scales.fill_(FP8_SCALE), v_scales.fill_(FP8_SCALE)
        keys = ab.PagedKV(k, v, self.table, self.lengths, k_scales, v_scales, BRAIN)
        ab.append_kv(keys, self.new, self.new, torch.arange(len(self.new), device=CUDA))
        return keys


def fa3(q: torch.Tensor, keys: ab.PagedKV) -> Call:
    """FlashAttention-3, with the schedule that an engine makes once a step."""
    operators, is_fp8 = torch.ops._vllm_fa3_C, keys.k.dtype == FP8
    scales = [None] * 3
    if is_fp8:
        q = (q / FP8_SCALE).to(FP8)
        scales = [torch.full((NUM_SEQS, KV_HEADS), FP8_SCALE, device=CUDA)] * 3
    starts = torch.arange(NUM_SEQS + 1, dtype=torch.int32, device=CUDA)
    plan = operators.get_scheduler_metadata(
        *(NUM_SEQS, 1, LENGTH, HEADS, KV_HEADS, DIM, DIM, q.dtype, keys.seq_lens, starts),
        *(None, None, None, None),  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
        *(PAGE, 0, True, -1, -1, False),  # page, max_seqlen_k_new, causal, window, softcap
        *(0, None, 0),  # num_splits: its own choice; pack_gqa, sm_margin
    )
    run = partial(
        operators.fwd,
        *(q, keys.k, keys.v, None, None, None, None),  # k_new, v_new, q_v, out
        *(starts, None, None, None, keys.seq_lens, 1, LENGTH, keys.page_table),
        *(None,) * 5,  # kv_batch_idx, leftpad_k, rotary cos, sin, lengths
        *scales,
        *(DIM**-0.5, True, -1, -1, 0.0, True),  # causal, window, softcap, rotary_interleaved
        *(plan, 0, None, 0, None, 1, 0, None),  # num_splits, pack_gqa, margin, sinks, ranks
    )
    return lambda: run()[0]


def flashinfer(q: torch.Tensor, keys: ab.PagedKV) -> Call:
    """FlashInfer's decode on tensor cores, with bfloat16 queries."""
    import flashinfer as library

    pages_each = keys.page_table.shape[1]
    table = (
        torch.arange(NUM_SEQS + 1, dtype=torch.int32, device=CUDA) * pages_each,
        keys.page_table.flatten(),
        torch.full((NUM_SEQS,), PAGE, dtype=torch.int32, device=CUDA),
    )
    names = ("indptr", "indices", "last_page_len")
    buffers = {f"paged_kv_{name}_buffer": x.clone() for name, x in zip(names, table, strict=True)}
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=CUDA),
        use_cuda_graph=True, use_tensor_cores=True, backend="fa2", **buffers,
    )  # fmt: skip
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=q.dtype, kv_data_type=keys.k.dtype)
    scales = {"k_scale": FP8_SCALE, "v_scale": FP8_SCALE} if keys.k.dtype == FP8 else {}
    out = torch.empty_like(q)
    return partial(wrapper.run, q, (keys.k, keys.v), out=out, **scales)


def format_calls(tune: bool, peers: bool) -> dict[str, list[Call]]:
    """Everything that is timed, and checked."""
    caches = Caches()
    calls: dict[str, list[Call]] = {}
    for name in FORMATS:
        keys = caches.keys(name)
        own = {name: [planned(caches.q, keys)]}
        for config in TILES if tune and name != "plain" else ():
            kind = f"{name}, 16 x {config.block_n}, {config.num_warps} warps, "
            kind += f"{config.num_stages} stages, {config.workers_per_sm} workers"
            own[kind] = [planned(caches.q, keys, config)]
        check(own, keys, caches.q[:, None])
        calls |= own
        if peers and name in ("plain", "fp8_tensor"):
            calls |= peer_calls("bf16" if name == "plain" else "fp8", keys, caches.q)
    return calls


def peer_calls(kind: str, keys: ab.PagedKV, q: torch.Tensor) -> dict[str, list[Call]]:
    """Each peer over these pages; one that cannot run is left out, with its reason."""
    calls: dict[str, list[Call]] = {}
    for name, make in (("FlashAttention-3", fa3), ("FlashInfer", flashinfer)):
        try:
            found = {f"{name} {kind}": [make(q, keys)]}
            error = FP8_QUERIES_ERROR if name == "FlashAttention-3" and kind == "fp8" else 0.01
            check(found, keys, q[:, None], error)
        except Exception as reason:
            print(f"{name} {kind}: {type(reason).__name__}: {reason}"[:500], file=sys.stderr)
        else:
            calls |= found
    return calls


def rows(tune: bool, peers: bool) -> Iterator[dict[str, object]]:
    """A row for each implementation, with its time over that of the plain cache."""
    times = time_in_turn(format_calls(tune, peers))
    for name, us in times.items():
        of_plain = round(us / times["plain"], 3)
        yield {"case": "B64 L8192 32/8", "format": name, "us": round(us, 1), "time": of_plain}


def main() -> None:
    """Print a line for each implementation, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="also time other tiles")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    if has_folder():
        add_folder()
        torch.ops.load_library(str(find_library("_vllm_fa3_C.abi3.so")))
    save_rows(options.out, header("decode"), print_rows(rows(options.tune, has_folder())))


if __name__ == "__main__":
    main()
