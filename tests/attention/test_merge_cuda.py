"""The CUDA merge: its kernels on the GPU, and on the CPU with threads of the host in their place.

test_merge.py holds it to the properties of every implementation; here is what is its own.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from states import double, laid_out, random_state, stack, torch_merge
from tolerance import assert_same_infinities, assert_state_close

import anabranch
from anabranch import AttentionState
from anabranch.kernels.cuda import compilers
from anabranch.kernels.cuda import merge as cuda_merge
from anabranch.kernels.cuda.merge import (
    DTYPES,
    KERNELS,
    SOURCES,
    Layout,
    LoadedMerge,
    load,
    load_kernels,
    select_layout,
)
from anabranch.launches import build_cache as cache
from anabranch.launches import driver, prepare
from anabranch.launches.extension import build_extension
from anabranch.launches.recorder import record
from anabranch.state import merge_stacked

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPE_PAIRS = list(itertools.product(DTYPES, repeat=2))
DLPACK_CPU = 1
HOST_CONTEXT = 7
NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
KERNEL_SOURCE = (SOURCES / "merge.cu").read_text()
LAUNCHES = Path(prepare.__file__).with_name("launches.c")
Merge = Callable[
    [tuple[AttentionState, ...], bool, torch.Tensor, torch.Tensor | None],
    None,
]


def random_parts(
    num_parts: int, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu"
) -> list[AttentionState]:
    return [random_state(shape, seed, dtype=dtype, device=device) for seed in range(num_parts)]


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> AttentionState:
    return AttentionState(
        torch.full(shape, torch.nan, dtype=dtype, device=device),
        torch.full(shape[:-1], torch.nan, device=device),
    )


def check(
    launch: Merge,
    states: Sequence[AttentionState],
    *,
    stacked: bool = False,
    out_dtype: torch.dtype | None = None,
    in_place: bool = False,
) -> None:
    """What `launch` writes is the merge, as exact as torch."""
    parts = states[0] if stacked else stack(states)
    dtype = out_dtype or parts.out.dtype
    expected64, by_torch = torch_merge(double(parts)), torch_merge(parts, dtype)
    first = AttentionState(*(x[0] for x in states[0])) if stacked else states[0]
    merged = first if in_place else poisoned(first.out.shape, dtype, str(first.out.device))
    launch(tuple(states), stacked, *merged)
    assert_state_close(merged, expected64, by_torch)


def check_against(merged: AttentionState, states: Sequence[AttentionState]) -> None:
    parts = stack(states)
    assert_state_close(merged, torch_merge(double(parts)), torch_merge(parts, merged.out.dtype))


def special_values(num_parts: int, device: str = "cpu") -> AttentionState:
    """Every combination of special LSEs along the tokens, of special outputs along the heads."""
    lses = [-torch.inf, torch.inf, torch.nan, -200.0, 0.0, 3.0]
    outs = [0.0, 1.0, torch.inf, -torch.inf, torch.nan]
    lse = torch.tensor(list(itertools.product(lses, repeat=num_parts)), device=device).T
    out = torch.tensor(list(itertools.product(outs, repeat=num_parts)), device=device).T
    shape = num_parts, lse.shape[1], out.shape[1], 4
    return AttentionState(
        out[:, None, :, None].expand(shape).contiguous(),
        lse[:, :, None].expand(shape[:-1]).contiguous(),
    )


def check_special_values(launch: Merge, parts: AttentionState) -> None:
    expected = merge_stacked(parts)
    merged = poisoned(parts.out.shape[1:], parts.out.dtype, str(parts.out.device))
    launch((parts,), True, *merged)
    for actual, wanted in zip(merged, expected, strict=True):
        assert_same_infinities(actual, wanted)
        torch.testing.assert_close(actual, wanted, equal_nan=True)


# ---- on any machine


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_without_spills(arch: str, tmp_path: Path) -> None:
    nvcc = compilers.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    command = [nvcc, f"-arch={arch}", *compilers.OPTIONS, "-cubin", "-Xptxas", "-v"]
    command += ["-o", str(tmp_path / "cubin"), str(SOURCES / "merge.cu")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    compiled = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    assert {name for name, *_ in compiled} == set(KERNELS)
    for name, stores, loads, registers in compiled:
        assert stores == loads == "0", name
        # 32: 2048 threads on a multiprocessor, 40: 1536
        limit = {"pair1": 32, "flat_": 40}.get(name[:5], 64)
        assert int(registers) <= limit, f"{name} uses {registers} registers"


def test_load_says_why_not() -> None:
    with pytest.raises(RuntimeError, match="NVIDIA GPU, got one on cpu"):
        load(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        anabranch.merge(random_state((3, 2, 8), 0), impl="cuda")


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilers, "_nvrtc_libraries", lambda: [str(tmp_path / "libnvrtc.so")])
    monkeypatch.setattr(compilers, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="needs a CUDA compiler"):
        compilers.find_cuda_compiler.__wrapped__()
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        build_extension(LAUNCHES)


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeCompiler:
    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.num_calls = 0

    def compile(self, source: str, arch: str) -> bytes:
        self.num_calls += 1
        return f"{source} for {arch}".encode()


def test_cubins_are_built_once(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    fake = FakeCompiler("fake 1")
    monkeypatch.setattr(compilers, "find_cuda_compiler", lambda: fake)
    assert not cache_folder.exists()
    for _ in range(2):
        assert compilers.build_cubin("kernel", "sm_90") == b"kernel for sm_90"
    assert fake.num_calls == 1
    assert compilers.build_cubin("kernel", "sm_80") == b"kernel for sm_80"
    assert compilers.build_cubin("other kernel", "sm_80") == b"other kernel for sm_80"
    fake.identity = "fake 2"
    compilers.build_cubin("kernel", "sm_90")
    assert fake.num_calls == 4


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data]
)
def test_damaged_entries_are_built_again(
    cache_folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = cache.build_once("thing", ("identity",), lambda: b"content")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.build_once("thing", ("identity",), lambda: b"content") == path
    assert cache.read(path) == b"content"


def test_builders_at_the_same_time_agree(cache_folder: Path) -> None:
    content = bytes(1 << 20)
    meeting = threading.Barrier(8)

    def build() -> bytes:
        meeting.wait(timeout=60)
        return content

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: cache.build_once("thing", (), build), range(8)))
    assert [cache.read(path) for path in set(paths)] == [content]
    assert list(cache_folder.iterdir()) == [paths[0]], "temporary files are gone"


def test_builds_without_a_place_for_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache.read(cache.build_once("thing", (), lambda: b"content")) == b"content"


# ---- the whole path on the CPU: launches.c with a driver that runs the kernels on host threads

HOST_TYPES = """
struct Half {
  unsigned short bits;
  static float2 unpack(unsigned word) {
    _Float16 pair[2];
    memcpy(pair, &word, 4);
    return {float(pair[0]), float(pair[1])};
  }
  static unsigned pack(float2 value) {
    _Float16 pair[2] = {_Float16(value.x), _Float16(value.y)};
    unsigned word;
    memcpy(&word, pair, 4);
    return word;
  }
};
struct Bfloat16 {
  unsigned short bits;
  static float2 unpack(unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
  static unsigned round(float value) {
    unsigned word = __float_as_uint(value);
    return value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  static unsigned pack(float2 value) { return round(value.x) | round(value.y) << 16; }
};
"""
HOST_DEVICE = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct dim3 { unsigned x, y, z; };
uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
float __uint_as_float(unsigned word) { float value; memcpy(&value, &word, 4); return value; }
unsigned __float_as_uint(float value) { unsigned word; memcpy(&word, &value, 4); return word; }
float __fdividef(float x, float y) { return x / y; }
unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
thread_local dim3 threadIdx, blockIdx;
dim3 blockDim;
std::barrier<>* block_barrier;
void __syncthreads() { block_barrier->arrive_and_wait(); }
"""
HOST_LAUNCH = """
// A kernel of two sources finds its arguments at the head of these, as on the GPU.
extern "C" void run(void (*kernel)(Arguments<8>), unsigned grid, const unsigned* block,
                    const Arguments<8>* arguments) {
  blockDim = {block[0], block[1], block[2]};
  const unsigned size = block[0] * block[1] * block[2];
  std::barrier<> barrier(size);
  block_barrier = &barrier;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < size; ++i)
    threads.emplace_back([=] {
      threadIdx = {i % block[0], i / block[0] % block[1], i / (block[0] * block[1])};
      for (unsigned j = 0; j < grid; ++j, __syncthreads()) {
        blockIdx = {j, 0, 0};
        kernel(*arguments);
      }
    });
  for (std::thread& thread : threads) thread.join();
}
"""


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class Launch(NamedTuple):
    """A kernel, its grid and its block."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]


class HostDriver:
    """The driver functions that launches.c calls, for a GPU made of host threads."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self.launches: list[Launch] = []
        self.context = HOST_CONTEXT  # the current one
        self.kernels = kernels
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.callbacks = (
            ctypes.CFUNCTYPE(number, ctypes.POINTER(LaunchConfig), pointer,
                             ctypes.POINTER(pointer), pointer)(self.launch),
            ctypes.CFUNCTYPE(number, ctypes.POINTER(pointer))(self.get_context),
            ctypes.CFUNCTYPE(number, pointer)(self.push_context),
            ctypes.CFUNCTYPE(number, pointer)(self.pop_context),
            ctypes.CFUNCTYPE(number, number, pointer)(lambda _status, _reason: 0),
            *[ctypes.CFUNCTYPE(number)(lambda: 1)] * 2,  # of tensor maps
        )  # fmt: skip

    def addresses(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self.callbacks)

    def functions(self) -> tuple[int, ...]:
        found = (ctypes.cast(getattr(self.kernels, name), ctypes.c_void_p) for name in KERNELS)
        return tuple(function.value or 0 for function in found)

    def get_context(self, context) -> int:
        context[0] = self.context
        return 0

    def push_context(self, context: int) -> int:
        self.context = context
        return 0

    def pop_context(self, _context: int) -> int:
        self.context = 0
        return 0

    def launch(self, config_pointer, function, parameters, _extra) -> int:
        assert self.context == HOST_CONTEXT
        config = config_pointer.contents
        name = KERNELS[self.functions().index(function)]
        self.launches.append(Launch(name, tuple(config.grid), tuple(config.block)))
        arguments = ctypes.c_void_p(parameters[0])
        self.kernels.run(ctypes.c_void_p(function), config.grid[0], config.block, arguments)
        return 0


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """launches.c on a HostDriver, for CPU tensors."""
    folder = tmp_path_factory.mktemp("host")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    head, _, rest = KERNEL_SOURCE.partition("struct Half {")
    _, _, tail = rest.partition("struct Float {")
    source = folder / "kernels.cpp"
    source.write_text(HOST_DEVICE + head + HOST_TYPES + "struct Float {" + tail + HOST_LAUNCH)
    command = [compiler, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(folder / "kernels.so")], check=True)
    host_driver = HostDriver(ctypes.CDLL(str(folder / "kernels.so")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENVIRONMENT_VARIABLE, str(folder))
        try:
            launches = build_extension(LAUNCHES)
        except RuntimeError as error:
            pytest.skip(str(error))
    launches.attach(torch.Tensor.__dlpack_c_exchange_api__)
    launches.connect(DLPACK_CPU, host_driver.addresses())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "connect_launches", lambda: launches)
        patch.setattr(driver, "primary_context", lambda _: HOST_CONTEXT)
        yield SimpleNamespace(driver=host_driver)


def on_host(host: SimpleNamespace, layout: Layout) -> Merge:
    """The launcher with this layout."""
    functions = dict(zip(KERNELS, host.driver.functions(), strict=True))

    def merge(*given: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_merge, "load_kernels", lambda _: LoadedMerge(functions, layout))
            cuda_merge.merge(*given)

    return merge


FAR = 1 << 30
ONE_ROW = Layout(32, 64, FAR, 64, FAR, 32, 0, 32, 0, False)  # to a thread; no groups
TWO_ROWS = Layout(32, 64, 0, 128, FAR, 32, 0, 64, FAR, False)
FLAT = replace(ONE_ROW, flat_block=64, flat_threads=FAR)
LAYOUTS = {"one row": ONE_ROW, "two rows": TWO_ROWS, "flat": FLAT}
host_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@host_layouts
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "head_dim"),
    [*((*pair, 40) for pair in DTYPE_PAIRS), *((HALF, HALF, dim) for dim in (1, 128, 300))],
)
def test_host_merges_separate_states(
    host: SimpleNamespace, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, head_dim: int
) -> None:
    for num_parts in (1, 2, 5, 8):
        states = random_parts(num_parts, (13, 3, head_dim), dtype)
        check(on_host(host, layout), states, out_dtype=out_dtype)


@host_layouts
@pytest.mark.parametrize("num_parts", [1, 2, 3, 17])
def test_host_merges_stacked_states(host: SimpleNamespace, layout: Layout, num_parts: int) -> None:
    for shape in ((13, 3, 64), (1, 5, 64), (5, 1, 7)):
        parts = stack(random_parts(num_parts, shape, HALF))
        check(on_host(host, layout), [parts], stacked=True)
        check(on_host(host, layout), [parts], stacked=True, in_place=True)


@host_layouts
@pytest.mark.parametrize("out_layout", ["transposed", "stride 2", "sliced", "reversed"])
@pytest.mark.parametrize("lse_layout", ["contiguous", "transposed", "sliced"])
def test_host_merges_any_strides(
    host: SimpleNamespace, layout: Layout, out_layout: str, lse_layout: str
) -> None:
    plain, other = random_parts(2, (7, 3, 16), HALF)
    other = AttentionState(laid_out(other.out, out_layout), laid_out(other.lse, lse_layout))
    check(on_host(host, layout), [plain, other])
    check(on_host(host, layout), [plain, other, plain])
    check(on_host(host, layout), [other, plain], in_place=True)


@host_layouts
@pytest.mark.parametrize("num_parts", [2, 3])
def test_host_special_values(host: SimpleNamespace, layout: Layout, num_parts: int) -> None:
    check_special_values(on_host(host, layout), special_values(num_parts))


def test_host_without_lse(host: SimpleNamespace) -> None:
    states = tuple(random_parts(2, (7, 3, 16), SINGLE))
    merged = poisoned((7, 3, 16), SINGLE)
    on_host(host, ONE_ROW)(states, False, merged.out, None)
    torch.testing.assert_close(merged.out, merge_stacked(stack(states)).out)
    assert merged.lse.isnan().all()


@pytest.mark.parametrize(
    ("num_tokens", "launch"),
    [
        (5, Launch("pair1_vector_f16_f16", (2, 1, 1), (8, 4, 1))),
        (9, Launch("pair2_vector_f16_f16", (1, 1, 1), (8, 8, 1))),
        (33, Launch("pair2_vector_f16_f16", (2, 1, 1), (8, 16, 1))),
    ],
)
def test_launches_follow_the_layout(host: SimpleNamespace, num_tokens: int, launch: Launch) -> None:
    layout = Layout(32, 64, 8 * 9, 128, 8 * 32, 32, 0, 64, 0, False)
    check(on_host(host, layout), random_parts(2, (num_tokens, 1, 64), HALF))
    assert host.driver.launches[-1] == launch


@pytest.mark.parametrize(
    ("shape", "launch"),
    [
        ((5, 2, 64), Launch("flat_vector_f16_f16", (2, 1, 1), (8, 8, 1))),
        ((9, 2, 72), Launch("flat_vector_f16_f16", (3, 1, 1), (9, 7, 1))),  # an odd row
        ((33, 2, 64), Launch("pair1_vector_f16_f16", (17, 1, 1), (8, 4, 1))),
    ],
)
def test_launches_of_flat_states(
    host: SimpleNamespace, shape: tuple[int, ...], launch: Launch
) -> None:
    layout = replace(FLAT, flat_threads=8 * 66)
    states = random_parts(2, shape, HALF)
    check(on_host(host, layout), states)
    assert host.driver.launches[-1] == launch
    check(on_host(host, layout), states, in_place=True)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 2, 64), (320, 128, 1)), ((2, 1, 64), (1 << 32, 64, 1))],
    ids=["tokens and heads", "beyond 32 bits"],
)
def test_rows_that_are_not_flat(
    host: SimpleNamespace, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Spaced unequally, or so far apart that an offset would be cut."""
    state, other = random_parts(2, shape, HALF)
    size = HALF.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
    with mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS | NO_RESERVE) as memory:
        apart = torch.frombuffer(memory, dtype=HALF).as_strided(shape, strides)
        apart.copy_(state.out)
        check(on_host(host, FLAT), [AttentionState(apart, state.lse), other])
        del apart
    assert host.driver.launches[-1].kernel == "pair1_vector_f16_f16"


def test_layouts_fit_the_kernels() -> None:
    """The launch bounds in merge.cu."""
    for capability in ((8, 0), (9, 0)):
        layout = select_layout(capability, 132)
        assert layout.flat_block <= 256
        assert max(layout.one_row_block, layout.two_rows_block, layout.large_block) <= 512
        assert layout.parts_block <= 256


def test_more_rows_than_an_index_holds() -> None:
    state = AttentionState(torch.empty(1, device="meta").expand(1 << 31, 1, 8), torch.empty(0))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="2\\^31 rows"):
        patch.setattr(cuda_merge, "load_kernels", lambda _: LoadedMerge({}, ONE_ROW))
        cuda_merge.merge((state,), False, *state)


@pytest.fixture
def repeated(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """merge() as on a GPU, whose repeated calls are launched without the launcher."""
    module = import_module("anabranch.merge")
    monkeypatch.setattr(module, "_are_on_gpu", lambda states: True)
    monkeypatch.setattr(module, "load_launcher", lambda *_: on_host(host, ONE_ROW))
    monkeypatch.setattr(module, "MERGES", type(module.MERGES)())
    monkeypatch.setattr(module, "record", lambda _: record(torch.device("cuda")))
    return host.driver.launches


@pytest.mark.parametrize("num_parts", [1, 2, 8])
@pytest.mark.parametrize("stacked", [False, True])
def test_merges_of_a_kind_are_launched_again(
    repeated: list[Launch], monkeypatch: pytest.MonkeyPatch, num_parts: int, stacked: bool
) -> None:
    for turn in range(3):
        parts = [random_state((7, 3, 16), 9 * turn + i, dtype=HALF) for i in range(num_parts)]
        given, options = ([stack(parts)], {"dim": 0}) if stacked else (parts, {})
        before = len(repeated)
        merged = anabranch.merge(*given, **options)
        check_against(merged, parts)
        assert merged.out.is_contiguous()
        into = anabranch.merge(*given, **options, out=poisoned((7, 3, 16), HALF))
        assert all(map(torch.equal, into, merged))
        mine = AttentionState(*(x[0] for x in given[0])) if stacked else given[0]
        assert anabranch.merge(*given, **options, out=mine) is mine
        assert all(map(torch.equal, mine, merged))
        assert len(repeated) == before + 3
        monkeypatch.setattr(cuda_merge, "launch_struct", None)  # the first of a kind needs it


def test_what_differs_is_checked_again(repeated: list[Launch]) -> None:
    a, b = random_parts(2, (7, 3, 16), SINGLE)
    anabranch.merge(a, b)
    anabranch.merge(a, b, out=a)
    check_against(anabranch.merge(a, b._replace(lse=laid_out(b.lse, "transposed"))), (a, b))
    with pytest.raises(ValueError, match=r"states\[1\].out has shape"):
        anabranch.merge(a, AttentionState(b.out[1:], b.lse[1:]))
    with pytest.raises(ValueError, match=r"states\[1\] requires grad"):
        anabranch.merge(a, b._replace(lse=b.lse.clone().requires_grad_()))
    with pytest.raises(ValueError, match=r"out.out overlaps states\[1\].out"):
        anabranch.merge(a, b, out=AttentionState(b.out, a.lse))
    memory = torch.randn(8, 3, 16)
    first, second = (AttentionState(memory[i : 7 + i], x.lse) for i, x in enumerate((a, b)))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out.out overlaps states\[1\].out"):
            anabranch.merge(first, second, out=first)


# ---- on a GPU


@contextmanager
def loaded(**changes: int) -> Iterator[Merge]:
    """The launcher with a changed layout."""
    found = load_kernels(torch.device("cuda", torch.cuda.current_device()))
    layout = replace(found.layout, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_merge, "load_kernels", lambda _: found._replace(layout=layout))
        yield cuda_merge.merge


@pytest.fixture(
    scope="module",
    params=["small", "two rows to a thread", "large", "flat"],
)
def launch(request: pytest.FixtureRequest) -> Iterator[Merge]:
    never = 2**31 - 1
    changes = {
        "small": {"two_rows_threads": never, "large_threads": never, "flat_threads": 0},
        "two rows to a thread": {
            "two_rows_threads": 0,
            "large_threads": never,
            "flat_threads": 0,
        },
        "large": {"two_rows_threads": 0, "large_threads": 0, "flat_threads": 0},
        "flat": {"flat_threads": never},
    }
    with loaded(**changes[request.param]) as launcher:
        yield launcher


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [5, 40, 128, 512])
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPE_PAIRS)
def test_head_dims_and_dtypes(
    launch: Merge, head_dim: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    states = random_parts(3, (61, 5, head_dim), dtype, "cuda")
    check(launch, states[:2], out_dtype=out_dtype)
    check(launch, states, out_dtype=out_dtype)
    check(launch, states[1:], in_place=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_separate_states(launch: Merge, num_parts: int) -> None:
    states = random_parts(num_parts, (57, 16, 128), HALF, "cuda")
    check(launch, states)
    check(launch, states, in_place=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [2, 3, 256])
@pytest.mark.parametrize("shape", [(1, 32, 128), (13, 4, 72)])
def test_stacked_states(launch: Merge, num_parts: int, shape: tuple[int, ...]) -> None:
    parts = stack(random_parts(num_parts, shape, SINGLE, "cuda"))
    check(launch, [parts], stacked=True, out_dtype=BRAIN)
    check(launch, [parts], stacked=True, in_place=True)


@pytest.mark.gpu
@pytest.mark.parametrize("out_layout", ["transposed", "stride 2", "sliced", "reversed"])
@pytest.mark.parametrize("lse_layout", ["contiguous", "transposed", "sliced"])
def test_strides(launch: Merge, out_layout: str, lse_layout: str) -> None:
    plain, other = random_parts(2, (37, 6, 64), HALF, "cuda")
    other = AttentionState(laid_out(other.out, out_layout), laid_out(other.lse, lse_layout))
    check(launch, [plain, other])
    check(launch, [other, plain, plain])
    check(launch, [other, plain], in_place=True)


@pytest.mark.gpu
def test_repeated_merges() -> None:
    a, b = random_parts(2, (300, 8, 128), HALF, "cuda")
    b = b._replace(lse=laid_out(b.lse, "transposed"))
    merged = anabranch.merge(a, b)
    into = anabranch.merge(a, b, out=poisoned((300, 8, 128), HALF, "cuda"))
    for again in (anabranch.merge(a, b), into, anabranch.merge(a, b, out=into)):
        assert all(map(torch.equal, merged, again))
        assert again.out.is_contiguous()
    with pytest.raises(ValueError, match=r"states\[1\].out has shape"):
        anabranch.merge(a, AttentionState(b.out[1:], b.lse[1:]))
    with pytest.raises(ValueError, match=r"states\[1\] requires grad"):
        anabranch.merge(a, b._replace(lse=b.lse.clone().requires_grad_()))
    with pytest.raises(ValueError, match=r"states\[1\] must be an AttentionState, got tuple"):
        anabranch.merge(a, tuple(b))
    assert all(map(torch.equal, merged, anabranch.merge(a, b)))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(launch: Merge) -> None:
    far = 2**31
    storage = torch.zeros(far + 256, dtype=HALF, device="cuda")
    state, other = random_parts(2, (2, 2, 128), HALF, "cuda")
    distant = storage.as_strided((2, 2, 128), (far, 128, 1))
    distant.copy_(state.out)
    check(launch, [AttentionState(distant, state.lse), other], in_place=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_parts", [2, 3])
def test_special_values(launch: Merge, num_parts: int) -> None:
    check_special_values(launch, special_values(num_parts, "cuda"))


@pytest.mark.gpu
def test_without_lse(launch: Merge) -> None:
    states = tuple(random_parts(2, (65, 3, 64), SINGLE, "cuda"))
    merged = poisoned((65, 3, 64), SINGLE, "cuda")
    launch(states, False, merged.out, None)
    torch.testing.assert_close(merged.out, merge_stacked(stack(states)).out)
    assert merged.lse.isnan().all()


@pytest.mark.gpu
def test_graph_replays_on_new_data(launch: Merge) -> None:
    states = random_parts(2, (300, 8, 128), BRAIN, "cuda")
    merged, again = (poisoned((300, 8, 128), BRAIN, "cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(tuple(states), False, *merged)
        launch((merged, states[1]), False, *again)  # on what the launch before it wrote
    for seed in (10, 20):
        news = [random_state((300, 8, 128), seed + i, dtype=BRAIN, device="cuda") for i in (0, 1)]
        for state, new in zip(states, news, strict=True):
            state.out.copy_(new.out)
            state.lse.copy_(new.lse)
        graph.replay()
        check_against(merged, news)
        check_against(again, [merged, news[1]])


@pytest.mark.gpu
def test_first_launch_may_be_captured() -> None:
    states = tuple(random_parts(2, (300, 8, 128), HALF, "cuda"))
    merged = poisoned((300, 8, 128), HALF, "cuda")
    graph = torch.cuda.CUDAGraph()
    with loaded() as launch, torch.cuda.graph(graph):
        launch(states, False, *merged)
    graph.replay()
    check_against(merged, states)


@pytest.mark.gpu
def test_runs_on_the_current_stream(launch: Merge) -> None:
    news = random_parts(2, (300, 8, 128), HALF, "cuda")
    states = [AttentionState(*map(torch.zeros_like, state)) for state in news]
    merged = poisoned((300, 8, 128), HALF, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # another stream would merge the zeros
        for state, new in zip(states, news, strict=True):
            state.out.copy_(new.out)
            state.lse.copy_(new.lse)
        launch(tuple(states), False, *merged)
    stream.synchronize()
    check_against(merged, news)


@pytest.mark.gpu
def test_runs_in_a_thread_without_a_context(launch: Merge) -> None:
    states = random_parts(2, (300, 8, 128), HALF, "cuda")
    merged = poisoned((300, 8, 128), HALF, "cuda")
    thread = threading.Thread(target=launch, args=(tuple(states), False, *merged))
    thread.start()
    thread.join()
    check_against(merged, states)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_a_device_that_is_not_current() -> None:
    states = random_parts(2, (300, 8, 128), HALF, "cuda:1")
    assert torch.cuda.current_device() == 0
    check_against(anabranch.merge(*states, impl="cuda"), states)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_compiles_into_one_graph() -> None:
    @torch.compile(fullgraph=True)
    def cascade(a: AttentionState, b: AttentionState) -> AttentionState:
        return anabranch.merge(a, AttentionState(b.out * 2, b.lse), impl="cuda")

    a, b = random_parts(2, (300, 8, 128), HALF, "cuda")
    check_against(cascade(a, b), [a, AttentionState(b.out * 2, b.lse)])
