"""Where Triton kernels can run: on a GPU, or on the CPU under the interpreter."""

from __future__ import annotations

import torch
import triton


def interpreting() -> bool:
    """Whether kernels run in the interpreter, as TRITON_INTERPRET=1 asks."""
    return bool(triton.knobs.runtime.interpret)


def require_triton_device(device: torch.device) -> None:
    """Refuse a device that Triton kernels cannot run on, with the reason."""
    if device.type == "cpu" and not interpreting():
        raise RuntimeError(
            "impl='triton' needs a GPU tensor, got one on the CPU "
            "(set TRITON_INTERPRET=1 before the import to run it in the interpreter)"
        )
