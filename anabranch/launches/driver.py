"""The CUDA driver through ctypes: loading a cubin, and the addresses of its functions for C."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache


@cache
def library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"it needs the NVIDIA driver: {error}") from error


def address(function: str) -> int:
    """The address of a driver function, for C code."""
    pointer = ctypes.cast(getattr(library(), function), ctypes.c_void_p)
    assert pointer.value is not None
    return pointer.value


@cache
def primary_context(device: int) -> int:
    """The context that torch uses on a device."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    assert context.value is not None
    return context.value


def load_functions(device: int, cubin: bytes, names: Iterable[str]) -> tuple[int, ...]:
    """Functions of a cubin on a device, in the order of their names."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    functions: list[int] = []
    with current(device):
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        for name in names:
            _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
            functions.append(function.value or 0)
    return tuple(functions)


@contextmanager
def current(device: int) -> Generator[None]:
    """Make a device's context the current one of this thread."""
    context = ctypes.c_void_p()
    _call("cuCtxPushCurrent_v2", ctypes.c_void_p(primary_context(device)))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))


def _call(function: str, *arguments: object) -> None:
    result = getattr(library(), function)(*arguments)
    if result:
        reason = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(reason))
        raise RuntimeError(f"{function} failed: {(reason.value or b'unknown').decode()}")


@cache
def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    read = library().cuFuncGetParamInfo
    handle = ctypes.c_void_p(function)
    while not read(handle, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes
