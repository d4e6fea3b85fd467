"""Ways to multiply by quantised weights on a GPU, each checked against float64 and timed.

    python benchmarks/quantised_variants.py [--layer] [--out FILE] [--seconds 100] [--processes 12]

The layer as models use it, then tiles of our kernels and torch's products of e4m3, beside cuBLAS in
bfloat16; `--layer` leaves out all but the layer. Kernels are compiled first, in processes side by
side. Weights rotate through more memory than the cache holds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from attention_bench.timing import event_us
from rows import header, save_rows
from torch import nn
from torch.nn import functional

from anabranch.kernels.layers.expand_codes import expand_codes
from anabranch.kernels.layers.quantise_rows import quantise_rows
from anabranch.kernels.layers.quantised_config import (
    NUM_COUNTERS,
    CodeConstants,
    QuantisedConfig,
    RowsConfig,
    fit_quantised,
)
from anabranch.kernels.layers.quantised_product import CodeArguments, quantised_product
from anabranch.kernels.layers.quantised_rows import quantised_rows
from anabranch.kernels.layers.scaled_product import scaled_product
from anabranch.launches.compile_ahead import compiling_ahead
from anabranch.llm.models.quantised_linear import QuantisedLinear, set_quantised
from anabranch.llm.models.quantised_weight import QuantisedWeight
from anabranch.llm.models.random_codes import draw_codes
from anabranch.llm.models.weight_scheme import WeightScheme

CUDA = torch.device("cuda", 0)
E4M3 = torch.float8_e4m3fn
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate up": (28672, 4096), "down": (4096, 14336)}
FORMATS = {
    "fp8": WeightScheme("compressed-tensors", "fp8", fp8_inputs=True),
    "int4": WeightScheme("compressed-tensors", "int4", 1, 128),
    "blocks": WeightScheme("fp8", "fp8", 128, 128, fp8_inputs=True),
    "int8": WeightScheme("compressed-tensors", "int8"),
    "int4/32": WeightScheme("compressed-tensors", "int4", 1, 32),
}
ROTATED = 200 << 20  # bytes of weights that are read in turn
SHARED_BYTES = 227 * 1024
# block_n, runs, num_warps
ROWS_TILES = [(16, 4, 4), (16, 8, 4), (16, 8, 8), (16, 16, 8), (32, 4, 4), (32, 8, 8)]
# block_m, block_n, num_warps, num_stages: of products by codes and of scaled products
CODE_TILES = [
    (32, 64, 4, 5), (32, 128, 8, 4), (64, 128, 8, 4), (64, 128, 4, 4), (64, 256, 8, 4),
    (64, 256, 16, 4), (128, 128, 8, 3), (128, 256, 8, 3), (256, 128, 8, 3), (256, 64, 8, 3),
]  # fmt: skip
SCALED_TILES = [
    (16, 128, 4, 6), (32, 128, 4, 6), (64, 128, 4, 6), (64, 128, 4, 4), (64, 128, 8, 6),
    (64, 64, 4, 8), (128, 128, 8, 5), (128, 128, 4, 4), (256, 128, 8, 4),
]  # fmt: skip


class Weights(NamedTuple):
    """Several weights of one shape and format, and what they are as numbers."""

    scheme: WeightScheme
    held: list[QuantisedWeight]
    exact: torch.Tensor  # float64 [n, k], the first

    @property
    def shape(self) -> tuple[int, int]:
        return self.held[0].n, self.held[0].k


class Way(NamedTuple):
    """A name, and the product of rows with a weight; gated, silu of one half times the other."""

    name: str
    call: Callable[[torch.Tensor, QuantisedWeight], torch.Tensor]
    gated: bool = False


def draw(name: str, n: int, k: int, count: int | None = None) -> Weights:
    """Random weights, as many as are read in turn."""
    scheme = FORMATS[name]
    size = n * k // (2 if scheme.kind == "int4" else 1)
    held = []
    for _ in range(count or max(2, -(-ROTATED // size))):
        codes = draw_codes(scheme, n, k, device=CUDA)
        held.append(QuantisedWeight(codes, fp8_inputs=scheme.fp8_inputs))
    first, dtype = held[0], held[0].dtype
    first.dtype = torch.float64
    exact = first.expanded()
    first.dtype = dtype
    return Weights(scheme, held, exact)


def arguments(weight: QuantisedWeight) -> tuple[CodeArguments, CodeConstants]:
    given = CodeArguments(weight.words.data, weight.scales.data, weight.zeros)
    return given, replace(weight.constants, packed=True)


def layer_of(weight: QuantisedWeight) -> QuantisedLinear:
    """Made once for a weight."""
    held: QuantisedLinear | None = getattr(weight, "layer", None)
    if held is None:
        linear = nn.Linear(weight.k, weight.n, bias=False, device="meta")
        set_quantised(linear, weight)
        held = cast("QuantisedLinear", linear)
        object.__setattr__(weight, "layer", held)  # not a part of the weight's module
    return held


def by_rows(config: RowsConfig, x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    given, constants = arguments(weight)
    y = x.new_empty(len(x), weight.n)
    quantised_rows(x, given, None, y, constants, config)
    return y


def by_codes(config: QuantisedConfig, x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    given, constants = arguments(weight)
    config = fit_quantised(config, constants, shared_bytes=SHARED_BYTES, hopper=True)
    y = x.new_empty(len(x), weight.n)
    sums = x.new_empty(config.splits, *y.shape, dtype=torch.float32) if config.splits > 1 else None
    quantised_product(x, given, None, y, sums, weight.counters, constants, config)
    return y


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    words = x.new_empty(len(x), x.shape[1] // 2, dtype=torch.int16)
    scales = x.new_empty(len(x), dtype=torch.float32)
    quantise_rows(x, words, scales, overlap=True)
    return words.view(E4M3), scales


def by_e4m3(config: QuantisedConfig, x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    codes, scales = quantised(x)
    y = x.new_empty(len(x), weight.n)
    sums = x.new_empty(config.splits, *y.shape, dtype=torch.float32) if config.splits > 1 else None
    w = weight.words.data.view(E4M3)
    scaled_product(codes, scales, w, weight.scales.data, None, y, sums, weight.counters, config)
    return y


def by_torch(fast: bool, x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    codes, scales = quantised(x)
    given: Any = {"scale_a": scales[:, None], "scale_b": weight.scales, "out_dtype": x.dtype}
    multiply: Any = torch._scaled_mm
    return multiply(codes, weight.words.view(E4M3).T, **given, use_fast_accum=fast)


def expanded(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    given, constants = arguments(weight)
    w = x.new_empty(weight.n, weight.k)
    expand_codes(given, w, constants)
    return functional.linear(x, w)


def split(tiles: tuple[int, ...], n: int, k: int, m: int, waves: int) -> QuantisedConfig:
    """A configuration whose columns are split so that there are up to so many tiles an SM."""
    config = QuantisedConfig(*tiles)
    count = -(-n // config.block_n) * -(-m // config.block_m)
    splits = max(1, min(waves * 132 // count, k // 512))
    return replace(config, splits=splits if count <= NUM_COUNTERS else 1)


def layer_ways(shape: str) -> Iterator[Way]:
    """The layer as models use it."""
    yield Way("layer", lambda x, weight: layer_of(weight)(x))
    if shape == "gate up":
        yield Way("layer gated", lambda x, weight: layer_of(weight).gated(x), gated=True)


def ways(name: str, n: int, k: int, m: int) -> Iterator[Way]:
    """All that are tried for so many rows."""
    if m <= 16:
        for tiles in ROWS_TILES:
            config = RowsConfig(8 if m <= 8 else 16, *tiles)
            label = f"rows {config.block_n} x {config.runs}, {config.num_warps} warps"
            yield Way(label, partial(by_rows, config))
    if 16 <= m <= 256:
        for tiles in CODE_TILES:
            if m <= tiles[0] <= max(32, m) or (m > 64 and tiles[0] >= 64):
                for waves in (1, 2):
                    config = split(tiles, n, k, m, waves)
                    if waves == 1 or config != split(tiles, n, k, m, 1):
                        label = f"codes {tiles} / {config.splits}"
                        yield Way(label, partial(by_codes, config))
    if name == "fp8" and m >= 8:
        for tiles in SCALED_TILES:
            if m <= tiles[0] <= max(16, m) or (m > 64 and tiles[0] >= 128):
                for waves in (1, 2):
                    config = split(tiles, n, k, m, waves)
                    if waves == 1 or config != split(tiles, n, k, m, 1):
                        label = f"e4m3 {tiles} / {config.splits}"
                        yield Way(label, partial(by_e4m3, config))
        yield Way("torch e4m3", partial(by_torch, False))
        yield Way("torch e4m3 fast", partial(by_torch, True))
    if m >= 256:
        yield Way("expanded", expanded)


def points() -> Iterator[tuple[str, str, int]]:
    """Shapes, formats and numbers of rows of the sweep, the most wanted first."""
    yield from product(SHAPES, ("fp8", "int4"), (1, 8, 64))
    yield from product(SHAPES, ("fp8", "int4"), (16, 32, 256))
    yield from product(("gate up", "o"), ("blocks", "int8"), (1, 8, 64, 256))
    yield from product(SHAPES, ("fp8", "int4"), (1024, 4096))


def layer_points() -> Iterator[tuple[str, str, int]]:
    yield from product(SHAPES, FORMATS, (1, 8, 16, 64, 256, 1024))


def compile_share(share: int, of: int, layer: bool) -> None:
    """Compile every so-many-th kernel; those of the sweep are the same for all outputs."""
    seen: set[tuple[str, str, int, str]] = set()
    place = 0
    with compiling_ahead():
        for shape, name, m in layer_points() if layer else points():
            n, k = SHAPES[shape]
            weight = None
            for way in layer_ways(shape) if layer else ways(name, n, k, m):
                config = getattr(way.call, "args", (None,))[0]
                if not layer and (config is None or isinstance(config, bool)):
                    continue
                if isinstance(config, QuantisedConfig):
                    config = replace(config, splits=min(config.splits, 2))
                key = (way.name.split()[0], name, k, repr(config))
                if key in seen and not layer:
                    continue
                seen.add(key)
                place += 1
                if place % of == share:
                    weight = weight or draw(name, n if layer else 128, k, 1).held[0]
                    way.call(torch.zeros(m, k, dtype=torch.bfloat16, device=CUDA), weight)


def compile_all(processes: int, layer: bool) -> None:
    command = [sys.executable, __file__, *(["--layer"] if layer else []), "--compile"]
    started = [subprocess.Popen([*command, f"{i}/{processes}"]) for i in range(processes)]
    failed = [process.wait() for process in started]
    if any(failed):
        print("compilation failed in", failed, flush=True)


def microseconds(calls: list[Callable[[], torch.Tensor]]) -> float:
    """Of a call, in a graph that goes through all weights until it lasts half a millisecond."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    once = min(event_us([graph.replay] * 2))
    repeats = max(1, round(500 / max(once, 1)))
    samples = event_us([lambda: [graph.replay() for _ in range(repeats)]] * 5)
    del kept
    return median(samples) / repeats / len(calls)


def measure(
    shape: str, name: str, m: int, weights: Weights, plain: list[torch.Tensor], tried: list[Way]
) -> dict[str, Any]:
    """Every way for so many rows, errors relative to the largest output."""
    x = torch.randn(m, weights.shape[1], device=CUDA, dtype=torch.bfloat16)
    checked = min(m, 300)
    exact = functional.linear(x[:checked].double(), weights.exact)
    found: list[dict[str, Any]] = []
    cublas = microseconds([lambda w=w: functional.linear(x, w) for w in plain])
    for way in tried:
        expected = exact
        if way.gated:
            gate, up = exact.chunk(2, -1)
            expected = functional.silu(gate) * up
        try:
            y = way.call(x, weights.held[0])[:checked]
            error = float((y.double() - expected).abs().max() / expected.abs().max())
            us = microseconds([lambda w=w, way=way: way.call(x, w) for w in weights.held])
            found.append({"way": way.name, "us": round(us, 2), "error": error})
        except Exception as problem:
            found.append({"way": way.name, "problem": f"{type(problem).__name__}: {problem}"[:300]})
    found.sort(key=lambda each: each.get("us", 1e9))
    return {"shape": shape, "format": name, "rows": m, "cublas": round(cublas, 2), "ways": found}


def show(row: dict[str, Any]) -> None:
    print(f"{row['shape']}, {row['format']}, {row['rows']} rows: cuBLAS bf16 {row['cublas']}")
    problems = [each for each in row["ways"] if "problem" in each]
    for each in [way for way in row["ways"] if "us" in way][:5] + problems[:2]:
        text = each.get("problem") or f"{each['us']:8.1f} us, error {each['error']:.5f}"
        print(f"    {each['way']:34s} {text}", flush=True)


def main() -> None:
    """Compile, then measure points until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", default="", help="a share of the kernels: I/OF, and no more")
    parser.add_argument("--layer", action="store_true", help="the layer alone")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.compile:
        share, of = map(int, given.compile.split("/"))
        compile_share(share, of, given.layer)
        return
    begin = time.perf_counter()
    compile_all(given.processes, given.layer)
    print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    held: tuple[str, str] | None = None
    weights: Weights | None = None
    plain: list[torch.Tensor] = []
    for shape, name, m in layer_points() if given.layer else points():
        if time.perf_counter() - begin > given.seconds:
            print("out of time before", shape, name, m)
            break
        n, k = SHAPES[shape]
        if held != (shape, name):
            weights = None
            plain = [torch.randn(n, k, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
            held, weights = (shape, name), draw(name, n, k)
        assert weights is not None
        tried = [*layer_ways(shape), *([] if given.layer else ways(name, n, k, m))]
        rows.append(measure(shape, name, m, weights, plain, tried))
        show(rows[-1])
    if given.out is not None:
        save_rows(given.out, header("quantised weights"), rows)
    print(f"{time.perf_counter() - begin:.1f} s in all")


if __name__ == "__main__":
    main()
