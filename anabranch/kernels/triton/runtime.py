"""Where Triton kernels can run: on a GPU, or on the CPU under the interpreter."""

from __future__ import annotations

import torch
import triton


def interpreting() -> bool:
    """Whether kernels run in the interpreter, as TRITON_INTERPRET=1 asks."""
    return bool(triton.knobs.runtime.interpret)


def device_refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device; None if they can."""
    if device.type == "cpu" and not interpreting():
        return (
            "it needs a GPU tensor, got one on the CPU "
            "(set TRITON_INTERPRET=1 before the import to run it in the interpreter)"
        )
    return None


def require_triton_device(device: torch.device) -> None:
    """Refuse a device that Triton kernels cannot run on, with the reason."""
    if reason := device_refusal(device):
        raise RuntimeError(f"impl='triton' cannot run here: {reason}")
