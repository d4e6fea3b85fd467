"""What a device can do, read when it is first asked for."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch

INTERPRETER_SMS = 3  # few, so that small tests have pairs that cross workers


@cache
def num_sms(device: torch.device) -> int:
    """Processors of a GPU; a few for the interpreter on the CPU."""
    if device.type == "cpu":
        return INTERPRETER_SMS
    return _properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for anything else."""
    if device.type != "cuda" or torch.version.hip:
        return 0, 0
    properties = _properties(device)
    return properties.major, properties.minor


def has_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one ahead ends: NVIDIA's GPUs since Hopper."""
    return capability(device) >= (9, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether kernels can convert float8_e4m3fn: NVIDIA's GPUs since Ada."""
    return capability(device) >= (8, 9)


def has_boxes(device: torch.device) -> bool:
    """Whether an accelerator copies boxes, and large tiles of them fit: data-center GPUs."""
    return capability(device)[0] in (9, 10)


def has_tensor_memory(device: torch.device) -> bool:
    """Whether accumulators lie in a memory of their own: NVIDIA's data-center Blackwell."""
    return capability(device)[0] == 10


@cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that one program, and all programs of a processor, may use."""
    if device.type == "cpu":
        return 1 << 30, 1 << 30
    properties = _properties(device)
    usual = properties.shared_memory_per_block
    per_program = getattr(properties, "shared_memory_per_block_optin", 0) or usual
    return per_program, properties.shared_memory_per_multiprocessor


def _properties(device: torch.device) -> Any:
    return cast("Any", torch.cuda.get_device_properties)(device)  # pyright: ignore
