"""Prompts over quantised pages beside bfloat16 pages: decoded first, and with codes as they are.

    ANABRANCH_PEERS=SITE python benchmarks/quantised_prompts.py --out FILE

SITE is a folder with vLLM's build of FlashAttention-3 (`_vllm_fa3_C.abi3.so`), whose fp8 has one
scale and takes queries in fp8 too; quantising these is not part of its time. Everything is captured
in CUDA graphs that are replayed in turn; the time of an eager call is of a loop of calls, which the
host may bound. Layouts and plans are made once, as by the layers of a step. Before anything is
timed, some tokens are compared with float64 over the decoded keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention_bench.peers.site import find_library, has_folder
from attention_bench.timing import time_loop
from hopper import Calls, Case, Inputs, flash_attention, interleaved, ours, prefill
from rows import header, print_rows, save_rows

import anabranch as ab
from anabranch.compositions.prompt_pieces import make_prompt_layout
from anabranch.compositions.prompt_workspace import PromptLens
from anabranch.compositions.quantised_prompt import PageExpander
from anabranch.keys.formats import E4M3, FORMATS, empty_store
from anabranch.launches.compile_ahead import compiling_ahead

FP8_SCALE = 0.02
CHECKED_TOKENS = 16
CUDA = torch.device("cuda")


def chunk(q_len: int, k_len: int, **given: Any) -> Case:
    return Case(f"chunk of {q_len} at {k_len}", (q_len,), (k_len,), page_size=16, **given)


CASES = [
    prefill("prompt 1 x 8192", 1, 8192, page_size=16),
    prefill("prompt 4 x 4096", 4, 4096, page_size=16),
    prefill("prompt 1 x 1024", 1, 1024, page_size=16, copies=20),
    chunk(2048, 8192),
    chunk(1024, 32768, copies=2),
    chunk(256, 2048, copies=12),
]


class StoredInputs(Inputs):
    """Inputs whose pages have a format."""

    def __init__(self, case: Case, copies: int, name: str) -> None:
        self.name = name
        super().__init__(case, copies)

    def keys(self) -> ab.PagedKV:
        plain = super().keys()
        assert isinstance(plain, ab.PagedKV)
        if self.name == "plain":
            return plain
        shape: Any = plain.k.shape
        stores = [empty_store(self.name, shape, plain.dtype, CUDA) for _ in range(2)]
        (k, k_scales), (v, v_scales) = stores
        if self.name == "fp8_tensor":
            for scales in (k_scales, v_scales):
                scales.fill_(FP8_SCALE)
        table = plain.page_table, plain.seq_lens
        keys = ab.PagedKV(k, v, *table, k_scales, v_scales, plain.dtype)
        slots = torch.arange(shape[0] * shape[1], device=CUDA)
        ab.append_kv(keys, plain.k.flatten(0, 1), plain.v.flatten(0, 1), slots)
        return keys

    def lens(self) -> dict[str, tuple[int, ...]]:
        case = self.case
        contexts = (k - q for q, k in zip(case.q_lens, case.k_lens, strict=True))
        return {"q_lens": case.q_lens, "context_lens": (*contexts,)}


def decoded_first(inputs: StoredInputs) -> tuple[Calls, Calls, bool]:
    """Attention and decoding alone, and whether an engine would decode."""
    q, keys = inputs.calls[0]
    expander, lens = PageExpander(keys, q.shape[1]), inputs.lens()
    layout = make_prompt_layout(expander.expanded, **lens)
    attend = partial(ab.attend_quantised_prompt, **lens, layout=layout)

    def decode(keys: ab.PagedKV) -> None:
        for piece in layout.pieces:
            for _ in PageExpander(keys, q.shape[1]).groups(piece, layout):
                pass

    calls = [partial(attend, q, keys) for q, keys in inputs.calls]
    alone = [partial(decode, keys) for _, keys in inputs.calls]
    return calls, alone, expander.prefers_expanded(PromptLens(**lens))


def error(inputs: StoredInputs, call: Callable[[], Any]) -> float:
    """Of some tokens of the first sequence, against float64 over what the codes stand for."""
    q, keys = inputs.calls[0]
    q_len, k_len = inputs.case.q_lens[0], inputs.case.k_lens[0]
    tokens = torch.linspace(0, q_len - 1, min(q_len, CHECKED_TOKENS)).long().to(CUDA)
    k, v = (x.double() for x in keys.gather(0))
    late = torch.arange(k_len, device=CUDA) > tokens[:, None] + k_len - q_len
    rows = q[tokens].double().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("tghd,kgd->ghtk", rows, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(late, -torch.inf).softmax(-1)
    exact = torch.einsum("ghtk,kgd->tghd", weights, v).flatten(1, 2)
    out = call()
    out = (out[0] if isinstance(out, list | tuple) else out)[tokens].double()
    return float((out - exact).norm() / exact.norm())


def candidates(case: Case) -> Iterator[tuple[str, str, StoredInputs, Calls, bool]]:
    """Format, way, inputs and calls, and whether an engine would take that way."""
    plain = StoredInputs(case, case.copies, "plain")
    yield "plain", "pages", plain, ours(plain)[1], True
    if has_folder():
        yield "FA3 plain", "pages", plain, flash_attention(plain), False
    for name in FORMATS:
        if name == "plain":
            continue
        inputs = StoredInputs(case, case.copies, name)
        calls, alone, preferred = decoded_first(inputs)
        yield name, "codes", inputs, ours(inputs)[1], not preferred
        yield name, "decoded first", inputs, calls, preferred
        yield name, "decoding alone", inputs, alone, False
        if has_folder() and name == "fp8_tensor":
            codes = StoredInputs(case, 0, name)
            codes.calls = [((q / FP8_SCALE).to(E4M3), keys) for q, keys in inputs.calls]
            yield "FA3 fp8", "pages", inputs, flash_attention(codes, FP8_SCALE), False


def measure(case: Case) -> Iterator[dict[str, object]]:
    found = {(name, way): given for name, way, *given in candidates(case)}
    errors = {
        key: error(inputs, calls[0])
        for key, (inputs, calls, _) in found.items()
        if key[1] != "decoding alone"
    }
    for key, value in errors.items():
        if not value < (0.08 if key[0] == "FA3 fp8" else 0.02):
            raise RuntimeError(f"{case.name}, {key} is wrong: relative error {value:.4f}")
    times = interleaved({" ".join(key): calls for key, (_, calls, _) in found.items()})
    of = times["plain pages"]
    for key, (_, calls, preferred) in found.items():
        us = times[" ".join(key)]
        eager = time_loop(calls, CUDA).us if key[1] in ("pages", "decoded first") else None
        yield {
            "case": case.name,
            "format": key[0],
            "way": key[1],
            "us": round(us, 2),
            "of_plain": round(us / of, 3),
            "eager_us": None if eager is None else round(eager, 1),
            "error": None if key not in errors else float(f"{errors[key]:.2e}"),
            "preferred": preferred,
        }


def compile_all(cases: list[Case]) -> float:
    """Compile the kernels of all cases side by side; seconds."""
    start = time.perf_counter()
    with compiling_ahead():
        for case in cases:
            for name, _, _, calls, _ in candidates(case):
                if not name.startswith("FA3"):
                    calls[0]()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each way, and write them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    if has_folder():
        torch.ops.load_library(str(find_library("_vllm_fa3_C.abi3.so")))
    torch.manual_seed(0)
    cases = [case for case in CASES if options.only in case.name]
    print(f"compiled in {compile_all(cases):.0f} s", flush=True)
    found: list[dict[str, object]] = []
    for case in cases:
        found += print_rows(measure(case))
        torch.cuda.empty_cache()
    save_rows(options.out, header("prompts over 32/8 heads of 128, pages of 16"), found)


if __name__ == "__main__":
    main()
