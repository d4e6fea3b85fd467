"""The device between runs: its work finished, its memory free."""

from __future__ import annotations

import gc

import torch


def release_memory() -> None:
    """Free the memory of a model that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
