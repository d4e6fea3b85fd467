"""What a launch of the CUDA merge costs from Python, and which layout of its kernel is fastest.

    python benchmarks/launch_cost.py --out launch_cost.json

Every way to launch and every layout is checked before it is timed; one that fails is printed with
its error and the rest goes on. The winners are written into kernels/cuda/.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import anabranch
from anabranch import AttentionState
from anabranch.bench.peers.site import add_folder, import_peer
from anabranch.bench.timing import time_graph, time_loop
from anabranch.kernels.cuda import compilers, driver
from anabranch.kernels.cuda.ctypes_launcher import CtypesLauncher, plan_launch
from anabranch.kernels.cuda.layout import DTYPES, KERNELS, select_layout
from anabranch.kernels.cuda.merge import SOURCES, load, load_launcher
from anabranch.state import merge_stacked

Pair = tuple[AttentionState, AttentionState]
EAGER = 256, 16, 128  # tokens, heads, head_dim
GRAPH_SIZES = ((256, 16, 128), (613, 48, 128), (4096, 32, 128), (16384, 32, 128))
ROWS, BLOCKS, STREAMED = (1, 2, 4), (128, 256, 512), ((0, 0), (1, 0), (1, 1))
WORKING_SET = 240 << 20  # bytes; four times the largest L2 so far

# A launch with pointers as integers, for contiguous states: the least that Python can pass.
INTEGER_LAUNCHER = r"""
#include <Python.h>
typedef struct { void *out, *lse; long long strides[7]; } State;
typedef struct { unsigned rows, heads, dim, parts, step, reserved; State states[3]; } Arguments;
static int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, void *, void **, void **);
static void *function;
static Arguments arguments;
static unsigned grid, rows_of_block;
static PyObject *setup(PyObject *self, PyObject *args) {
    unsigned long long address, kernel;
    if (!PyArg_ParseTuple(args, "KKIII", &address, &kernel, &arguments.rows, &arguments.dim,
                          &rows_of_block)) return NULL;
    *(void **)&launch_kernel = (void *)address;
    function = (void *)kernel;
    arguments.heads = arguments.step = 1, arguments.parts = 2;
    grid = (arguments.rows + rows_of_block - 1) / rows_of_block;
    for (int i = 0; i < 3; i++) {
        arguments.states[i].strides[1] = arguments.dim;
        arguments.states[i].strides[3] = 1;
        arguments.states[i].strides[5] = 1;
    }
    Py_RETURN_NONE;
}
static int submit(void *stream) {
    void *parameters[] = {&arguments};
    return launch_kernel(function, grid, 1, 1, arguments.dim / 8, rows_of_block, 1, 0, stream,
                         parameters, NULL);
}
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    static const int order[] = {1, 2, 0};
    for (int i = 0; i < 3; i++) {
        arguments.states[order[i]].out = PyLong_AsVoidPtr(args[2 * i]);
        arguments.states[order[i]].lse = PyLong_AsVoidPtr(args[2 * i + 1]);
    }
    return PyLong_FromLong(submit(PyLong_AsVoidPtr(args[6])));
}
static PyObject *repeat(PyObject *self, PyObject *count) { /* the driver's own cost */
    for (long i = PyLong_AsLong(count); i > 0; i--) submit(NULL);
    Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"setup", setup, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"repeat", repeat, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "integers", NULL, -1, methods};
PyMODINIT_FUNC PyInit_integers(void) { return PyModule_Create(&module); }
"""
# The same from a shared library made by nvcc, called through ctypes.
LIBRARY_LAUNCHER = r"""
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
HEAD = (SOURCES / "merge.cu").read_text().partition("\nMERGE(f16_f16")[0]


def main() -> None:
    """Measure, print, and write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["launches", "layouts"])
    options = parser.parse_args()
    add_folder()
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    if options.only != "layouts":
        rows += measure(launches())
    if options.only != "launches":
        rows += layouts()
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "compiler": compilers.find_cuda_compiler().identity.splitlines()[-1],
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }
    print(f"{record['gpu']}, {record['seconds']:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def device() -> torch.device:
    """The GPU that everything runs on."""
    return torch.device("cuda", torch.cuda.current_device())


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


def check(merged: AttentionState, pair: Sequence[AttentionState]) -> None:
    """Refuse to time what is wrong."""
    stacked = AttentionState(*map(torch.stack, zip(*pair, strict=True)))
    expected = merge_stacked(stacked)
    torch.testing.assert_close(merged.out.float(), expected.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(merged.lse, expected.lse)


# ---- ways to launch


Way = Callable[[AttentionState, AttentionState], Any]


def launches() -> Iterator[tuple[str, Callable[[], Way]]]:
    """Ways to launch, each behind a function that sets it up."""
    yield "launch: ctypes, cuLaunchKernel", ctypes_way
    yield "launch: ctypes, shared library of nvcc", library_way
    yield "launch: C extension, integers", integer_way
    yield "launch: C extension, DLPack tensors", launcher_way
    yield "merge: anabranch.merge", lambda: anabranch.merge
    yield "merge: anabranch.merge, impl='cuda'", lambda: partial(anabranch.merge, impl="cuda")
    yield "merge: allocated in Python, launcher.c", allocating_way
    yield "merge: allocated and checked in launcher.c", try_merge_way
    yield "merge: the same behind the signature of merge", shortcut_way
    yield "merge: anabranch.merge, impl='triton'", lambda: partial(anabranch.merge, impl="triton")
    yield "merge: FlashInfer", flashinfer_way
    yield "piece: 100 launches by the driver alone", driver_way
    yield "piece: two empty_like", lambda: lambda a, _b: tuple(map(torch.empty_like, a))
    yield "piece: two _empty_strided_cuda", empty_strided_way
    yield "piece: is_compiling", lambda: lambda _a, _b: torch.compiler.is_compiling()


def measure(ways: Iterator[tuple[str, Callable[[], Way]]]) -> list[dict[str, Any]]:
    """Time calls from Python, one after another."""
    pair = rotations(*EAGER, torch.float16)[0]
    rows: list[dict[str, Any]] = []
    for name, set_up in ways:
        try:
            way = set_up()
            merged = way(*pair)
            if isinstance(merged, AttentionState):
                check(merged, pair)
            timing = time_loop([partial(way, *pair)] * 3, device())
        except Exception as error:
            print(f"{name:<50} {type(error).__name__}: {error}", flush=True)
            continue
        rows.append({"name": name, "us": timing.us, "spread": timing.spread})
        print(f"{name:<50} {timing.us:7.2f} us  spread {timing.spread:.0%}", flush=True)
    return rows


def into_fixed_memory(launch: Callable[..., object]) -> Way:
    """A way that launches the launcher's contract into the same memory every time."""
    merged = like(rotations(*EAGER, torch.float16)[0][0])
    out, lse = merged

    def way(*pair: AttentionState) -> AttentionState:
        launch(pair, False, out, lse)
        return merged

    return way


def ctypes_way() -> Way:
    """The fallback of the package."""
    properties = torch.cuda.get_device_properties(device())
    capability = properties.major, properties.minor
    cubin = compilers.build_cubin((SOURCES / "merge.cu").read_text(), arch())
    functions = driver.load_functions(device().index, cubin, KERNELS)
    layout = select_layout(capability, properties.multi_processor_count)
    return into_fixed_memory(CtypesLauncher(device().index, functions, layout))


def launcher_way() -> Way:
    """launcher.c."""
    return into_fixed_memory(load(device()))


def with_integers(launch: Callable[..., int], *sizes: int) -> Way:
    """A way that passes data pointers and the stream as integers."""
    merged = like(rotations(*EAGER, torch.float16)[0][0])
    out, lse = merged
    index = device().index
    stream = torch._C._cuda_getCurrentRawStream

    def way(a: AttentionState, b: AttentionState) -> AttentionState:
        status = launch(
            a.out.data_ptr(), a.lse.data_ptr(), b.out.data_ptr(), b.lse.data_ptr(),
            out.data_ptr(), lse.data_ptr(), *sizes, stream(index),
        )  # fmt: skip
        assert not status
        return merged

    return way


def library_way() -> Way:
    """A library with its own launch function."""
    folder = Path(tempfile.mkdtemp())
    kernel = "MERGE_PAIR(pair, Half, Half, 8, 1, true, false)"
    (folder / "merge.cu").write_text(HEAD + "\n" + kernel + LIBRARY_LAUNCHER)
    nvcc = compilers.find_nvcc()
    assert nvcc, "no nvcc"
    command = [nvcc, f"-arch={arch()}", *compilers.OPTIONS, "-w", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([*command, "-o", str(folder / "merge.so"), str(folder / "merge.cu")], check=True)
    launch = ctypes.CDLL(str(folder / "merge.so")).launch
    launch.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_uint] * 2 + [ctypes.c_void_p]
    return with_integers(launch, EAGER[0] * EAGER[1], EAGER[2])


def integers() -> Any:
    """The C extension that takes integers, set up for the eager size."""
    source = Path(tempfile.mkdtemp(), "integers.c")
    source.write_text(INTEGER_LAUNCHER)
    module = compilers.build_extension(source)
    kernel = "MERGE_PAIR(pair, Half, Half, 8, 1, true, false)"
    cubin = compilers.build_cubin(f"{HEAD}\n{kernel}\n", arch())
    (function,) = driver.load_functions(device().index, cubin, ["pair"])
    tokens, heads, head_dim = EAGER
    address = driver.address("cuLaunchKernel")
    module.setup(address, function, tokens * heads, head_dim, 128 // (head_dim // 8))
    return module


def integer_way() -> Way:
    """A C extension that takes integers."""
    return with_integers(integers().launch)


def driver_way() -> Way:
    """Launches in C, of the states that a launch from Python left behind."""
    module = integers()
    launch = with_integers(module.launch)

    def way(a: AttentionState, b: AttentionState) -> AttentionState:
        merged = launch(a, b)
        module.repeat(99)
        return merged

    return way


def allocating_way() -> Way:
    """Python allocates, launcher.c checks and launches."""
    launch, empty_like = load(device()), torch.empty_like

    def way(*states: AttentionState) -> AttentionState:
        first = states[0]
        merged = AttentionState(empty_like(first.out), empty_like(first.lse))
        launch(states, False, *merged)
        return merged

    return way


def try_merge_way() -> Way:
    """launcher.c does everything."""
    load(device())
    try_merge = load_launcher().try_merge
    return lambda *states: try_merge(states)


def shortcut_way() -> Way:
    """The shortcut that merge() can take before its checks."""
    load(device())
    try_merge = load_launcher().try_merge

    def merge(
        *states: AttentionState,
        dim: int | None = None,
        out: AttentionState | None = None,
        out_dtype: torch.dtype | None = None,
        with_lse: bool = True,
        impl: str | None = None,
    ) -> AttentionState:
        if (
            dim is None and out is None and out_dtype is None and with_lse and impl is None
            and not torch.compiler.is_compiling()
        ):  # fmt: skip
            merged = try_merge(states)
            if merged is not None:
                return merged
        return anabranch.merge(
            *states, dim=dim, out=out, out_dtype=out_dtype, with_lse=with_lse, impl=impl
        )

    return merge


def empty_strided_way() -> Way:
    """What Inductor allocates with."""
    empty_strided = torch._C._dynamo.guards._empty_strided_cuda
    tokens, heads, head_dim = EAGER

    def way(_a: AttentionState, _b: AttentionState) -> tuple[torch.Tensor, ...]:
        shape, strides = (tokens, heads, head_dim), (heads * head_dim, head_dim, 1)
        out = empty_strided(shape, strides, torch.float16)
        return out, empty_strided(shape[:2], (heads, 1), torch.float32)

    return way


def flashinfer_way() -> Way:
    """The peer; its LSE in base 2 costs the same."""
    merge_state = import_peer("flashinfer").merge_state
    return lambda a, b: tuple(merge_state(a.out, a.lse, b.out, b.lse))


# ---- layouts of the kernel


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


def layouts() -> list[dict[str, Any]]:
    """Time every layout in a CUDA graph, then the best of each size with overlapping launches."""
    names = {torch.float16: "Half", torch.float32: "Float"}
    rows: list[dict[str, Any]] = []
    for dtype, (tokens, heads, head_dim) in product(names, GRAPH_SIZES):
        if dtype is torch.float32 and tokens in (613, 4096):
            continue
        functions = layout_functions(dtype, names[dtype])
        pairs = rotations(tokens, heads, head_dim, dtype)
        moved = 3 * pairs[0][0].out.nbytes + 3 * pairs[0][0].lse.nbytes
        title = f"{tokens} x {heads} x {head_dim} {DTYPES[dtype]}"

        def run(key, block, overlap, title=title, pairs=pairs, functions=functions, moved=moved):
            row = {"case": title, "rows": key[0], "streamed": key[1], "block": block}
            row["overlap"] = overlap
            try:
                row["us"] = time_layout(pairs, functions[key], key[0], block, overlap)
                row["tb_s"] = moved / row["us"] / 1e6
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
                print(f"{title}: {row}", flush=True)
            return row

        found = [run(key, block, False) for key, block in product(functions, BLOCKS)]
        found = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
        for row in found[:4]:
            key = row["rows"], row["streamed"]
            found.append(run(key, row["block"], True))
        rows += found
        print(f"{title}: {len(found)} layouts, best and worst", flush=True)
        found = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
        for row in (*found[:6], *found[-2:]):
            print(
                f"  rows {row['rows']}  block {row['block']}  streamed loads, stores "
                f"{row['streamed']}  overlap {row['overlap']:d}  {row['us']:8.2f} us  "
                f"{row['tb_s']:.2f} TB/s",
                flush=True,
            )
        rows += compare_in_graph(title, pairs, moved)
    return rows


def compare_in_graph(title: str, pairs: list[Pair], moved: int) -> list[dict[str, Any]]:
    """The package as it is and FlashInfer, on the same inputs."""
    rows: list[dict[str, Any]] = []
    for name, set_up in (
        ("anabranch", lambda: partial(anabranch.merge, impl="cuda")),
        ("FlashInfer", flashinfer_way),
    ):
        try:
            way = set_up()
            timing, _ = time_graph([partial(way, *pair) for pair in pairs], device())
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append({"case": title, "name": name, "us": timing.us, "tb_s": moved / timing.us / 1e6})
        print(f"  {name:<62} {timing.us:8.2f} us  {moved / timing.us / 1e6:.2f} TB/s", flush=True)
    return rows


def layout_functions(dtype: torch.dtype, name: str) -> dict[tuple[int, tuple[int, int]], int]:
    """Kernels by rows to a thread and by what is streamed past the caches."""
    keys = list(product(ROWS, STREAMED))
    lines = [
        f"MERGE_PAIR(pair{i}, {name}, {name}, {16 // dtype.itemsize}, {rows}, {loads}, {stores})"
        for i, (rows, (loads, stores)) in enumerate(keys)
    ]
    cubin = compilers.build_cubin("\n".join([HEAD, *lines, ""]), arch())
    names = [f"pair{i}" for i in range(len(keys))]
    return dict(zip(keys, driver.load_functions(device().index, cubin, names), strict=True))


def time_layout(pairs: list[Pair], function: int, rows: int, block: int, overlap: bool) -> float:
    """Microseconds of a launch in a CUDA graph."""
    launch_kernel = driver.library().cuLaunchKernelEx
    properties = torch.cuda.get_device_properties(device())
    layout = select_layout((properties.major, properties.minor), properties.multi_processor_count)
    attribute = Attribute(id=6)  # programmatic stream serialization
    attribute.value[0] = 1

    def bind(pair: Pair) -> Callable[[], AttentionState]:
        merged = like(pair[0])
        arguments = plan_launch(pair, False, *merged, layout).arguments
        head_dim = merged.out.shape[-1]
        lanes = head_dim * merged.out.itemsize // 16
        count = merged.lse.numel()
        step = rows * (block // lanes)
        config = Config((-(-count // step), 1, 1), (lanes, block // lanes, 1), 0)
        config.attributes, config.num_attributes = ctypes.pointer(attribute), int(overlap)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(arguments, ctypes.c_void_p))

        def call() -> AttentionState:
            config.stream = torch._C._cuda_getCurrentRawStream(device().index)
            status = launch_kernel(
                ctypes.byref(config), ctypes.c_void_p(function), parameters, None
            )
            assert not status, f"cuLaunchKernelEx: {status}"
            return merged

        call.keep = arguments
        return call

    calls = [bind(pair) for pair in pairs]
    check(calls[0](), pairs[0])
    timing, _ = time_graph(calls, device())
    check(calls[-1](), pairs[-1])
    return timing.us


def arch() -> str:
    """The architecture of the GPU, as compilers name it."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device()))


if __name__ == "__main__":
    main()
