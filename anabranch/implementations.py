"""What a CPU and a GPU do each in its own way: modules of one name for torch and for Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

FOLDERS = {"torch": "anabranch.kernels.cpu", "triton": "anabranch.kernels.triton"}


@cache
def load_implementation(module: str, impl: str | None, device: torch.device) -> ModuleType:
    """The module of `impl`, without a name that of the device; an error where it cannot run."""
    if impl is None:
        impl = "torch" if device.type == "cpu" else "triton"
    if impl not in FOLDERS:
        raise ValueError(f"impl must be one of {', '.join(FOLDERS)}, got {impl!r}")
    reason = None
    if impl == "torch" and device.type != "cpu":
        reason = f"it is the CPU's, got tensors on {device}"
    elif impl == "triton":
        reason = import_module(f"{FOLDERS[impl]}.runtime").device_refusal(device)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run here: {reason}")
    return import_module(f"{FOLDERS[impl]}.{module}")
