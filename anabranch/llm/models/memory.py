"""Whether weights fit on a device, asked before they are loaded."""

from __future__ import annotations

import torch

GIB = 2**30


def check_fits(num_bytes: int, device: torch.device | str) -> None:
    """Raise a ValueError where a GPU has fewer than `num_bytes` free; other devices pass."""
    device = torch.device(device)
    if device.type != "cuda":
        return
    free = free_bytes(device)
    if num_bytes > free:
        raise ValueError(
            f"model needs {num_bytes / GIB:.1f} GiB, the GPU has {free / GIB:.1f} GiB free"
        )


def free_bytes(device: torch.device) -> int:
    """What the driver has free on a GPU, and what torch holds there without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
