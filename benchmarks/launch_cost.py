"""What a launch of the CUDA merge costs from Python, and which layout of its kernel is fastest.

    python benchmarks/launch_cost.py --out launch_cost.json

Everything is checked before it is timed; what fails is printed with its error and the rest goes
on. The winners are written into kernels/cuda/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention_bench.peers.site import add_folder, import_peer
from attention_bench.timing import time_graph, time_loop

import anabranch
from anabranch import AttentionState
from anabranch.kernels.cuda import compilers
from anabranch.kernels.cuda.merge import DTYPES, SOURCES
from anabranch.launches import driver
from anabranch.merge import MERGES
from anabranch.state import merge_stacked

Pair = tuple[AttentionState, AttentionState]
Way = Callable[[AttentionState, AttentionState], Any]
EAGER = 256, 16, 128  # tokens, heads, head_dim
GRAPH_SIZES = (EAGER, (613, 48, 128), (4096, 32, 128), (16384, 32, 128))
ROWS, BLOCKS = (1, 2, 4), (128, 256, 512)
WORKING_SET = 240 << 20  # bytes; four times the largest L2 so far
HEAD = (SOURCES / "merge.cu").read_text().partition("\nMERGE(f16_f16")[0]
# A shared library made by nvcc that launches for contiguous states.
LIBRARY_LAUNCHER = r"""
MERGE_PAIR(pair, Half, Half, 8, 1)
static Arguments<2> arguments;
extern "C" int launch(void* a, void* la, void* b, void* lb, void* m, void* lm, unsigned rows,
                      unsigned dim, void* stream) {
  arguments = {rows, 1, dim, 2, 1, 0, {m, (float*)lm, 0, dim, 0, 1, 0, 1, 0},
               {{a, (float*)la, 0, dim, 0, 1, 0, 1, 0}, {b, (float*)lb, 0, dim, 0, 1, 0, 1, 0}}};
  const dim3 block(dim / 8, 128 / (dim / 8));
  pair<<<(rows + block.y - 1) / block.y, block, 0, (cudaStream_t)stream>>>(arguments);
  return cudaGetLastError();
}
"""


def main() -> None:
    """Measure, print, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    add_folder()
    rows = [*measure_launches(), *measure_layouts()]
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "compiler": compilers.find_cuda_compiler().identity.splitlines()[-1],
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure_launches() -> Iterator[dict[str, Any]]:
    """Calls from Python, one after another, at the smallest size."""
    pair = rotations(*EAGER, torch.float16)[0]
    for name, set_up in {
        "launch: ctypes, driver": driver_way,
        "launch: ctypes, shared library of nvcc": library_way,
        "launch: C extension, DLPack tensors": prepared_way,
        "merge: anabranch.merge": lambda: anabranch.merge,
        "merge: anabranch.merge into given memory": into_way,
        "merge: anabranch.merge, impl='triton'": lambda: partial(anabranch.merge, impl="triton"),
        "merge: FlashInfer": flashinfer_way,
        "piece: two empty_like": lambda: lambda a, _b: tuple(map(torch.empty_like, a)),
        "piece: two _empty_strided_cuda": empty_strided_way,
    }.items():
        try:
            way = set_up()
            check(way(*pair), pair)
            timing = time_loop([partial(way, *pair)] * 3, device())
        except Exception as error:
            print(f"{name:<50} {type(error).__name__}: {error}", flush=True)
            continue
        print(f"{name:<50} {timing.us:7.2f} us  spread {timing.spread:.0%}", flush=True)
        yield {"name": name, "us": timing.us, "spread": timing.spread}


def driver_way() -> Way:
    """The driver's bindings: arguments packed in Python."""
    (function,) = compile_pairs("Half", 8, [1])
    merged = like(rotations(*EAGER, torch.float16)[0][0])
    return lambda *pair: bind_launch(function, pair, merged, 1, 128, overlap=False)()


def library_way() -> Way:
    """A library with its own launch function, given integers."""
    nvcc = compilers.find_nvcc()
    assert nvcc, "no nvcc"
    folder = Path(tempfile.mkdtemp())
    (folder / "merge.cu").write_text(HEAD + LIBRARY_LAUNCHER)
    command = [nvcc, f"-arch={arch()}", *compilers.OPTIONS, "-w", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([*command, "-o", str(folder / "merge.so"), str(folder / "merge.cu")], check=True)
    launch = ctypes.CDLL(str(folder / "merge.so")).launch
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_uint] * 2 + [ctypes.c_void_p]
    merged = like(rotations(*EAGER, torch.float16)[0][0])
    tokens, heads, head_dim = EAGER

    def way(*pair: AttentionState) -> AttentionState:
        pointers = (x.data_ptr() for state in (*pair, merged) for x in state)
        assert not launch(*pointers, tokens * heads, head_dim, stream())
        return merged

    return way


def prepared_way() -> Way:
    """What launches.c does of a merge that is repeated, into the same memory every time."""
    pair = rotations(*EAGER, torch.float16)[0]
    merged = anabranch.merge(*pair)
    run, launches, _ = next(reversed(MERGES.values())).launches.prepared
    return lambda a, b: run(launches, (*a, *b, *merged)) or merged


def into_way() -> Way:
    return partial(anabranch.merge, out=like(rotations(*EAGER, torch.float16)[0][0]))


def empty_strided_way() -> Way:
    empty_strided = torch._C._dynamo.guards._empty_strided_cuda
    shape, strides = EAGER, (EAGER[1] * EAGER[2], EAGER[2], 1)
    return lambda _a, _b: (
        empty_strided(shape, strides, torch.float16),
        empty_strided(shape[:2], (shape[1], 1), torch.float32),
    )


def flashinfer_way() -> Way:
    """The peer; its LSE in base 2 costs the same."""
    merge_state = import_peer("flashinfer").merge_state
    return lambda a, b: tuple(merge_state(a.out, a.lse, b.out, b.lse))


def measure_layouts() -> Iterator[dict[str, Any]]:
    """Every layout in a CUDA graph, then the package as it is and FlashInfer."""
    for dtype, size in product((torch.float16, torch.float32), GRAPH_SIZES):
        title = f"{' x '.join(map(str, size))} {DTYPES[dtype]}"
        name = {torch.float16: "Half", torch.float32: "Float"}[dtype]
        functions = compile_pairs(name, 16 // dtype.itemsize, ROWS)
        pairs = rotations(*size, dtype)
        merged = [like(pair[0]) for pair in pairs]
        kernels = zip(ROWS, functions, strict=True)
        ways: dict[str, list[Callable[[], Any]]] = {
            f"rows {rows}, block {block}, overlap {overlap:d}": [
                bind_launch(function, pair, into, rows, block, overlap=overlap)
                for pair, into in zip(pairs, merged, strict=True)
            ]
            for (rows, function), block, overlap in product(kernels, BLOCKS, (False, True))
        }
        ways["anabranch"] = [partial(anabranch.merge, *pair) for pair in pairs]
        if dtype is torch.float16:  # FlashInfer takes no float32
            ways["FlashInfer"] = [partial(flashinfer_way(), *pair) for pair in pairs]
        for way, calls in ways.items():
            for x in merged[-1]:
                x.fill_(torch.nan)
            check(calls[-1](), pairs[-1])
            us = time_graph(calls, device())[0].us
            tb_s = 3 * sum(x.nbytes for x in merged[0]) / us / 1e6
            print(f"{title:<24} {way:<32} {us:8.2f} us  {tb_s:.2f} TB/s", flush=True)
            yield {"case": title, "name": way, "us": us, "tb_s": tb_s}


def compile_pairs(name: str, width: int, rows: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The kernel for two states, by rows to a thread."""
    lines = [f"MERGE_PAIR(pair{n}, {name}, {name}, {width}, {n})" for n in rows]
    cubin = compilers.build_cubin("\n".join([HEAD, *lines, ""]), arch())
    return driver.load_functions(device().index, cubin, [f"pair{n}" for n in rows])


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


OVERLAP = Attribute(6, 0, (1,))  # programmatic stream serialization


def bind_launch(
    function: int,
    pair: tuple[AttentionState, ...],
    merged: AttentionState,
    rows: int,
    block: int,
    *,
    overlap: bool,
) -> Callable[[], AttentionState]:
    """A launch for contiguous states by the driver's bindings."""
    num_rows, head_dim = merged.lse.numel(), merged.out.shape[-1]
    arguments = struct.pack("6I", num_rows, 1, head_dim, 2, 1, 0)
    for out, lse in (merged, *pair):
        arguments += struct.pack("2Q7q", out.data_ptr(), lse.data_ptr(), 0, head_dim, 0, 1, 0, 1, 0)
    parameters = (ctypes.c_char_p * 1)(arguments)
    lanes = head_dim * merged.out.itemsize // 16
    num_blocks = -(-num_rows // (rows * (block // lanes)))
    config = Config((num_blocks, 1, 1), (lanes, block // lanes, 1), 0)
    config.attributes, config.num_attributes = ctypes.pointer(OVERLAP), int(overlap)

    def call() -> AttentionState:
        config.stream = stream()
        launch = driver.library().cuLaunchKernelEx
        status = launch(ctypes.byref(config), ctypes.c_void_p(function), parameters, None)
        assert not status, f"cuLaunchKernelEx: {status}"
        return merged

    return call


def rotations(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> list[Pair]:
    """Pairs of states, together larger than the cache."""
    size = 3 * tokens * heads * head_dim * dtype.itemsize
    shape = tokens, heads, head_dim

    def state() -> AttentionState:
        out = torch.randn(shape, device=device()).to(dtype)
        return AttentionState(out, 4 * torch.randn(shape[:-1], device=device()))

    return [(state(), state()) for _ in range(max(2, -(-WORKING_SET // size)))]


def like(state: AttentionState) -> AttentionState:
    """Memory for a merged state, full of NaN."""
    return AttentionState(*(torch.full_like(x, torch.nan) for x in state))


def check(merged: object, pair: Pair) -> None:
    """Refuse to time a merge that is wrong."""
    if isinstance(merged, AttentionState):
        expected = merge_stacked(AttentionState(*map(torch.stack, zip(*pair, strict=True))))
        torch.testing.assert_close(merged.out.float(), expected.out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(merged.lse, expected.lse)


def device() -> torch.device:
    """The GPU that everything runs on."""
    return torch.device("cuda", torch.cuda.current_device())


def stream() -> int:
    """The current stream, as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


def arch() -> str:
    """The architecture of the GPU, as compilers name it."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device()))


if __name__ == "__main__":
    main()
