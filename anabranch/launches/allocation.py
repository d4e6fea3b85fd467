"""New memory on a GPU, as Inductor allocates it: 1.3 us where torch.empty takes 2.3 (H200)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_fast: Callable[..., torch.Tensor] | None = getattr(
    _core._dynamo.guards, "_empty_strided_cuda", None
)
_current_device: Callable[[], int] | None = getattr(_core, "_cuda_getDevice", None)
_is_deterministic: Callable[[], bool] = _core._get_deterministic_algorithms


def allocate(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """New memory; deterministic algorithms want it filled, which the fast way leaves out."""
    given: Any = (shape, strides)
    if device.type != "cuda" or _fast is None or _current_device is None or _is_deterministic():
        return torch.empty_strided(*given, dtype=dtype, device=device)
    if _current_device() != device.index:
        return torch.empty_strided(*given, dtype=dtype, device=device)
    return _fast(*given, dtype)
