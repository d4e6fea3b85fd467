"""The CUDA compilers found on this machine: NVRTC or nvcc."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from anabranch.launches.build_cache import build_once, read
from anabranch.launches.extension import run

OPTIONS = ("--std=c++17",)


class CudaCompiler(Protocol):
    """Turns CUDA C++ into a cubin."""

    identity: str

    def compile(self, source: str, arch: str) -> bytes:
        """A cubin, or a RuntimeError with the compiler's log."""
        ...


def build_cubin(source: str, arch: str) -> bytes:
    """The cubin of a source for an architecture such as "sm_90", from the cache if it is there."""
    compiler = find_cuda_compiler()
    identity = (source, arch, compiler.identity, *OPTIONS)
    return read(build_once(f"{arch}.cubin", identity, lambda: compiler.compile(source, arch)))


@cache
def find_cuda_compiler() -> CudaCompiler:
    """NVRTC, which comes with torch and matches its driver, before nvcc."""
    for library in _nvrtc_libraries():
        try:
            return Nvrtc(library)
        except OSError:
            continue
    if path := find_nvcc():
        return Nvcc(path)
    raise RuntimeError(
        "impl='cuda' needs a CUDA compiler: neither libnvrtc (package nvidia-cuda-nvrtc) "
        "nor nvcc was found"
    )


class Nvrtc:
    """The compiler as a library."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        if Path(library).is_absolute():  # NVRTC opens this one by a name the loader may not find
            for builtins in Path(library).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.identity = f"nvrtc {major.value}.{minor.value}"

    def compile(self, source: str, arch: str) -> bytes:
        """A cubin, or a RuntimeError with the compiler's log."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"merge.cu", 0, None, None
        )
        options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
        array = (ctypes.c_char_p * len(options))(*options)
        try:
            if self.library.nvrtcCompileProgram(program, len(options), array):
                raise RuntimeError(f"NVRTC failed:\n{self._read(program, 'ProgramLog').decode()}")
            return self._read(program, "CUBIN")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        if result := getattr(self.library, function)(*arguments):
            raise RuntimeError(f"{function} failed with status {result}")


class Nvcc:
    """The compiler as a command."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity = run([path, "--version"])

    def compile(self, source: str, arch: str) -> bytes:
        """A cubin, or a RuntimeError with the compiler's log."""
        with tempfile.TemporaryDirectory() as folder:
            cu, cubin = Path(folder, "merge.cu"), Path(folder, "merge.cubin")
            cu.write_text(source)
            run([self.path, f"-arch={arch}", *OPTIONS, "-cubin", "-o", str(cubin), str(cu)])
            return cubin.read_bytes()


def find_nvcc() -> str | None:
    """The path of nvcc: the toolkit's in $CUDA_HOME before the one in $PATH."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=f"{toolkit}/bin") or shutil.which("nvcc")


def _nvrtc_libraries() -> Iterator[str]:
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libnvrtc.so.{major}" if major else "libnvrtc.so"
    yield name  # loaded already, or where the loader looks
    package = importlib.util.find_spec("nvidia")
    for folder in (package and package.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{name}*")))
    if toolkit := os.environ.get("CUDA_HOME"):
        yield str(Path(toolkit, "lib64", name))
    yield f"/usr/local/cuda/lib64/{name}"
