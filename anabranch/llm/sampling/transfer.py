"""Many small arrays in one copy between host and device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
_ALIGNMENT = 8
_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def upload(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on the device, by one copy from pinned memory."""
    starts, num_bytes = dict[str, int](), 0
    for name, array in arrays.items():
        starts[name] = num_bytes
        num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = staged.numpy()
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory[starts[name] : starts[name] + raw.size] = raw
    arrived = staged.to(device, non_blocking=True)
    return {
        name: arrived[starts[name] : starts[name] + array.nbytes]
        .view(_DTYPES[array.dtype.name])
        .view(array.shape)
        for name, array in arrays.items()
    }


@dataclass(frozen=True, slots=True)
class Download:
    """A copy to the host under way."""

    _words: Tensor  # int32, pinned if it comes from a GPU
    _layout: dict[str, tuple[torch.Size, bool]]  # shape, and whether it is of floats
    _arrival: torch.cuda.Event | None

    def wait(self) -> dict[str, Array]:
        """The arrays as int32 or float32, once they are here."""
        if self._arrival is not None:
            self._arrival.synchronize()
        arrays, start = dict[str, Array](), 0
        for name, (shape, is_float) in self._layout.items():
            words = self._words[start : start + shape.numel()].numpy().reshape(shape)
            arrays[name] = words.view(np.float32) if is_float else words
            start += shape.numel()
        return arrays


def download(tensors: Mapping[str, Tensor]) -> Download:
    """Starts to copy tensors of integers below 2^31 and of float32 to the host, in one copy."""
    layout = {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}
    words = torch.cat([_words(tensor) for tensor in tensors.values()])
    if words.device.type != "cuda":
        return Download(words, layout, None)
    pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
    pinned.copy_(words, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(words.device))
    return Download(pinned, layout, arrival)


def _words(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.float().reshape(-1).view(torch.int32)
    return tensor.int().reshape(-1)
