"""C files as Python modules, and the one that describes tensors and launches kernels again."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import torch

from anabranch.launches import driver
from anabranch.launches.build_cache import build_once

DLPACK_CUDA = 2  # DLDeviceType
# In the order in which launches.c takes them.
DRIVER_FUNCTIONS = (
    "cuLaunchKernelEx",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGetErrorString",
    "cuTensorMapEncodeTiled",
    "cuTensorMapReplaceAddress",
)


@cache
def load_launches() -> ModuleType | None:
    """launches.c, which reads tensors; None where there is no compiler."""
    try:
        launches = build_extension(Path(__file__).with_name("launches.c"))
        launches.attach(torch.Tensor.__dlpack_c_exchange_api__)
    except (RuntimeError, AttributeError):
        return None
    return launches


@cache
def connect_launches() -> ModuleType | None:
    """launches.c with the driver, to launch kernels; None where there is no GPU of NVIDIA's."""
    launches = load_launches()
    if launches is None or torch.version.cuda is None or not torch.cuda.is_available():
        return None
    try:
        launches.connect(DLPACK_CUDA, tuple(map(driver.address, DRIVER_FUNCTIONS)))
    except (RuntimeError, AttributeError):  # an older driver
        return None
    return launches


def build_extension(source: Path) -> ModuleType:
    """A C file as a Python module of the same name, from the cache if it is there."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    import sysconfig  # seldom needed, and large

    header = Path(sysconfig.get_path("include"), "Python.h")
    if compiler is None or not header.exists():
        missing = (
            "a C compiler" if compiler is None else f"{header} (a package such as python3-dev)"
        )
        raise RuntimeError(f"{source.name} needs {missing}")
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{header.parent}", str(source), "-o"]
    identity = (source.read_text(), run([compiler, "--version"]), *command[1:5])
    path = build_once(source.stem + EXTENSION_SUFFIXES[0], identity, lambda: _compile(command))
    spec = importlib.util.spec_from_file_location(source.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(command: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "extension.so")
        run([*command, str(target)])
        return target.read_bytes()


def run(command: list[str]) -> str:
    """What a command prints, or a RuntimeError with it."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}{result.stdout}")
    return result.stdout
