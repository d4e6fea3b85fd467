"""The merge in CUDA C++: kernels in merge.cu, launched by launcher.c at the lowest cost known.

Both are compiled on first use and cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from anabranch.kernels.cuda.compilers import build_cubin
from anabranch.kernels.cuda.layout import DTYPES, KERNELS, select_layout
from anabranch.launches import driver
from anabranch.launches.extension import DLPACK_CUDA, build_extension
from anabranch.state import AttentionState

SOURCES = Path(__file__).parent
# In the order in which launcher.c takes them.
LAUNCHER_FUNCTIONS = (
    "cuLaunchKernelEx",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGetErrorString",
)

Launcher = Callable[
    [tuple[AttentionState, ...], bool, torch.Tensor, torch.Tensor | None],
    None,
]
# Checks, allocates and launches; None for states that it leaves to the checks of merge().
Shortcut = Callable[[tuple[AttentionState, ...]], AttentionState | None]


def merge(
    states: tuple[AttentionState, ...],
    stacked: bool,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Write the merge of `states`, or of dimension 0 of the only one, into `out` and `lse`."""
    load(out.device)(states, stacked, out, lse)


@cache
def load(device: torch.device) -> Launcher:
    """The launcher, or an error that says why this device cannot run it."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise RuntimeError(f"impl='cuda' needs a tensor on an NVIDIA GPU, got one on {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major, properties.minor
    if capability < (8, 0):
        raise RuntimeError(f"impl='cuda' needs compute capability 8.0, {device} has {capability}")
    launcher = load_launcher()
    cubin = build_cubin((SOURCES / "merge.cu").read_text(), "sm_{}{}".format(*capability))
    functions = driver.load_functions(index, cubin, KERNELS)
    layout = select_layout(capability, properties.multi_processor_count)
    launcher.load(DLPACK_CUDA, index, driver.primary_context(index), functions, astuple(layout))
    return launcher.launch


def load_shortcut(device: torch.device) -> Shortcut:
    """The merge of separate states into new memory in one call."""
    load(device)
    return load_launcher().try_merge


@cache
def load_launcher() -> ModuleType:
    """launcher.c, compiled and connected to torch and the driver."""
    launcher = build_extension(SOURCES / "launcher.c")
    launcher.attach(
        torch.Tensor.__dlpack_c_exchange_api__,
        AttentionState,
        # What Inductor allocates with: 1.3 us where empty_like takes 2.3 (H200).
        getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided),
        tuple(DTYPES),
        tuple(map(driver.address, LAUNCHER_FUNCTIONS)),
    )
    return launcher


def _empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
