"""The compilers found on this machine: NVRTC or nvcc for kernels, a C compiler for the launcher."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from anabranch.kernels.build_cache import build_once, read

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
        self.identity = _run([path, "--version"])

    def compile(self, source: str, arch: str) -> bytes:
        """A cubin, or a RuntimeError with the compiler's log."""
        with tempfile.TemporaryDirectory() as folder:
            cu, cubin = Path(folder, "merge.cu"), Path(folder, "merge.cubin")
            cu.write_text(source)
            _run([self.path, f"-arch={arch}", *OPTIONS, "-cubin", "-o", str(cubin), str(cu)])
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


def build_extension(source: Path) -> ModuleType:
    """A C file as a Python module of the same name, from the cache if it is there."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if compiler is None or not header.exists():
        missing = (
            "a C compiler" if compiler is None else f"{header} (a package such as python3-dev)"
        )
        raise RuntimeError(f"the launcher of impl='cuda' needs {missing}")
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{header.parent}", str(source), "-o"]
    identity = (source.read_text(), _run([compiler, "--version"]), *command[1:5])
    path = build_once(
        source.stem + EXTENSION_SUFFIXES[0], identity, lambda: _compile_extension(command)
    )
    spec = importlib.util.spec_from_file_location(source.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile_extension(command: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "extension.so")
        _run([*command, str(target)])
        return target.read_bytes()


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}{result.stdout}")
    return result.stdout
