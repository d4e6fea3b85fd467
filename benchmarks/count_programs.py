"""How many programs drawn calls compile, kernel by kernel: the first use of each takes seconds.

    python benchmarks/count_programs.py --count 1000 --out FILE

Needs no GPU. The launches of calls on tensors without memory are recorded as for an H200, and told
apart as Triton tells them apart: by types, constants, and integers that are 1 or divisible by 16.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from drawn_shapes import DrawnCall, draw_calls
from rich.progress import track
from rows import header, save_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import anabranch as ab
from anabranch import device
from anabranch.keys import KeySource

H200 = SimpleNamespace(
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
)
MARKS = (10, 40, 100, 200, 500, 1000)  # calls after which programs are counted


class Programs:
    """The programs that launches would compile."""

    def __init__(self) -> None:
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binders: dict[JITFunction[Any], Any] = {}
        self.seen: set[tuple[JITFunction[Any], str]] = set()

    def note(self, kernel: JITFunction[Any], *args: Any, **options: Any) -> None:
        """In the place of a launch."""
        del options["grid"], options["warmup"]
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
        _, specialization, chosen = self.binders[kernel](*args, **options)
        self.seen.add((kernel, f"{specialization} {sorted(chosen.items())}"))

    def by_kernel(self) -> dict[str, int]:
        """How many of each kernel, the most first."""
        names = Counter(kernel.__module__.partition("kernels.")[2] for kernel, _ in self.seen)
        return dict(names.most_common())


def keys_of(call: DrawnCall) -> KeySource:
    """Packed keys, pages or latent rows without memory."""
    dims, page, seqs = call.model.dims, call.page_size, len(call.k_lens)
    if not page:
        k, v = (values(sum(call.k_lens), call.heads[1], dim) for dim in dims)
        return ab.RaggedKV(k, v, index(seqs + 1))
    pages = [-(-length // page) for length in call.k_lens]
    table = index(seqs, max(pages))
    if call.kind == "latent":
        return ab.LatentKV(values(sum(pages), page, dims[0]), table, index(seqs), dims[1])
    k, v = (values(sum(pages), page, call.heads[1], dim) for dim in dims)
    return ab.PagedKV(k, v, table, index(seqs))


def values(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def index(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def run(call: DrawnCall) -> None:
    """Plan and attend, as an engine does."""
    q, keys = values(sum(call.q_lens), call.heads[0], call.model.dims[0]), keys_of(call)
    starts = index(len(call.q_lens) + 1)
    rules: dict[str, Any] = {"cu_seqlens_q": starts, "window": call.window, "causal": call.causal}
    cap = {} if call.model.softcap is None else {"softcap": call.model.softcap}
    plan = ab.make_plan(q, keys, **rules)
    ab.attend(q, keys, plan=plan, **rules, **cap)


def main() -> None:
    """Draw, record, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    options = parser.parse_args()
    programs, rows = Programs(), list[dict[str, object]]()

    def note(kernel: JITFunction[Any], *args: Any, **given: Any) -> None:
        programs.note(kernel, *args, **given)

    with (
        mock.patch.object(device, "_properties", lambda _: H200),
        mock.patch.object(device, "capability", lambda _: (H200.major, H200.minor)),
        mock.patch.object(JITFunction, "run", note),
    ):
        calls = draw_calls(options.seed, options.count)
        for count, call in enumerate(track(calls, "recording"), 1):
            run(call)
            if count in MARKS or count == options.count:
                rows.append({"calls": count, "programs": len(programs.seen)})
    for row in rows:
        print(f"{row['calls']:6} calls {row['programs']:6} programs")
    for name, count in programs.by_kernel().items():
        print(f"{count:6} {name}")
    about = header() | {"device": "none, recorded as for an H200", "seed": options.seed}
    del about["timing"]
    save_rows(options.out, about | {"by kernel": programs.by_kernel()}, rows)


if __name__ == "__main__":
    main()
