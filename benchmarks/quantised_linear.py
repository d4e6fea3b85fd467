"""Products with quantised weights on a GPU: checked against float64, then timed beside cuBLAS.

    python benchmarks/quantised_linear.py [--tune] [--out FILE]
    python benchmarks/quantised_linear.py --steps llama-3.1-8b,llama-3.1-8b-fp8,llama-3.1-8b-int4

Weights have the shapes of Llama-3.1-8B and rotate, so that each is read from memory. `--tune` also
times tiles that are not selected; `--steps` times steps of whole engines with random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from attention_bench.timing import time_graph
from rows import header, print_rows, save_rows
from torch import nn
from torch.nn import functional

from anabranch.kernels.layers import quantised_config
from anabranch.llm.bench.device_wait import release_memory
from anabranch.llm.bench.latency import full_batch_ms
from anabranch.llm.bench.workload import random_prompts
from anabranch.llm.cli.step_times import RecordedStats
from anabranch.llm.models import quantised_linear
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised
from anabranch.llm.models.quantised_model import draw_codes
from anabranch.llm.models.quantised_weight import QuantisedWeight
from anabranch.llm.models.weight_scheme import WeightScheme

CUDA = torch.device("cuda", 0)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 16, 32, 64, 256, 1024)
CHECKED = (1, 8, 16, 17, 64, 200, 300)
FORMATS = {
    "fp8": WeightScheme("compressed-tensors", "fp8", fp8_inputs=True),
    "fp8 blocks": WeightScheme("fp8", "fp8", 128, 128),
    "int8": WeightScheme("compressed-tensors", "int8"),
    "int4": WeightScheme("compressed-tensors", "int4", 1, 128),
}
TUNED = [
    quantised_config.QuantisedConfig(block_m, block_n, num_warps, num_stages)
    for block_m in (16, 32, 64)
    for block_n, num_warps in ((64, 4), (128, 4), (128, 8))
    for num_stages in (3, 4, 6)
]
ROTATED = 1 << 28  # bytes of weights that are read in turn, more than the cache holds


def layer(scheme: WeightScheme, n: int, k: int) -> nn.Linear:
    """A linear layer with random codes."""
    linear = nn.Linear(k, n, bias=False, device="meta")
    codes = draw_codes(scheme, n, k, device=CUDA)
    set_quantised(linear, QuantisedWeight(codes, fp8_inputs=scheme.fp8_inputs))
    return linear


def check(name: str, n: int, k: int, num_rows: int) -> dict[str, object]:
    """The largest error against float64, as a share of the largest output; and torch's."""
    linear = layer(FORMATS[name], n, k)
    assert isinstance(linear, QuantisedLinear)
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    held = linear.quantised
    held.dtype = torch.float64
    exact = functional.linear(x.double(), held.expanded())
    by_torch = functional.linear(x, held.expanded().bfloat16())
    size = exact.abs().max()
    errors = [float((y.double() - exact).abs().max() / size) for y in (linear(x), by_torch)]
    return {"check": name, "n": n, "k": k, "rows": num_rows, "error": errors[0], "bf16": errors[1]}


def microseconds(linears: list[nn.Linear], k: int, num_rows: int) -> float:
    """Of one product, in a graph that goes through all weights."""
    x = torch.randn(num_rows, k, device=CUDA, dtype=torch.bfloat16)
    calls = [lambda linear=linear: linear(x) for linear in linears]
    return time_graph(calls, CUDA)[0].us


def time_products(tune: bool) -> Iterator[dict[str, object]]:
    """A row for each shape, format and number of rows, cuBLAS first."""
    for shape, (n, k) in SHAPES.items():
        plain = [nn.Linear(k, n, bias=False, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
        cublas = {m: microseconds(plain, k, m) for m in ROWS}
        yield {"shape": shape, "format": "bfloat16", "us": cublas}
        del plain
        for name, scheme in FORMATS.items():
            width = 0.5 if scheme.kind == "int4" else 1
            linears = [layer(scheme, n, k) for _ in range(max(2, int(ROTATED / (n * k * width))))]
            found = {m: microseconds(linears, k, m) for m in ROWS}
            yield {"shape": shape, "format": name, "us": found}
            if tune and name in ("fp8", "int4"):
                yield from time_tiles(shape, name, linears, n, k)


def time_tiles(
    shape: str, name: str, linears: list[nn.Linear], n: int, k: int
) -> Iterator[dict[str, object]]:
    """The best tiles for some numbers of rows, of those tried."""
    for num_rows in (1, 16, 64):
        found: list[tuple[float, dict[str, object]]] = []
        for config in TUNED:
            if not num_rows <= config.block_m <= max(2 * num_rows, 16):
                continue
            tiles = -(-n // config.block_n) * -(-num_rows // config.block_m)
            for splits in sorted({1, 2, 4, 8, max(1, 264 // tiles), max(1, 528 // tiles)}):
                if splits * tiles > 2048 or splits > k // 512:
                    continue
                chosen = replace(config, splits=splits)
                with (
                    mock.patch.object(quantised_linear, "select_quantised", lambda *_, c=chosen: c),
                    mock.patch.object(quantised_linear, "_has_scaled", lambda *_: False),
                ):
                    found.append((microseconds(linears, k, num_rows), asdict(chosen)))
        found.sort(key=lambda each: each[0])
        yield {"tiles": shape, "format": name, "rows": num_rows, "best": found[:3]}


def time_steps(model: str, tokens: int) -> Iterator[dict[str, object]]:
    """Milliseconds of a step in which all sequences decode, and of a prompt."""
    from anabranch import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        f"dummy:{model}",
        device="cuda",
        max_model_len=2048,
        max_num_seqs=64,
        kv_cache_gib=12,
        prefix_caching=False,
    )
    start_s = time.perf_counter() - begin
    memory = torch.cuda.memory_allocated() / 2**30
    for num_seqs in (1, 8, 64):
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
        steps: list[float] = []
        for seed in range(3):
            llm.engine.stats = stats = RecordedStats()
            prompts = random_prompts(num_seqs, 1024, llm.engine.vocab_size, seed)
            found = full_batch_ms(llm.generate(prompts, params), stats)
            steps += found if seed else []
        begin = time.perf_counter()
        once = SamplingParams(temperature=1.0, max_tokens=1, ignore_eos=True)
        llm.generate(random_prompts(num_seqs, 1024, llm.engine.vocab_size, 99), once)
        prompt_ms = 1e3 * (time.perf_counter() - begin)
        yield {
            "model": model,
            "case": f"{num_seqs}x1024",
            "step_ms": median(steps),
            "prompt_ms": prompt_ms,
            "start_s": start_s,
            "gib": memory,
        }


def main() -> None:
    """Check, time, print and write rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--steps", default="", help="models, instead of products")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    if given.steps:
        for model in given.steps.split(","):
            rows += print_rows(time_steps(model, given.tokens))
            release_memory()
    else:
        sizes = [SHAPES["o"], SHAPES["down"]]
        rows += print_rows(check(f, *size, m) for f in FORMATS for size in sizes for m in CHECKED)
        rows += print_rows(time_products(given.tune))
    if given.out is not None:
        save_rows(given.out, header("quantised weights"), rows)


if __name__ == "__main__":
    main()
