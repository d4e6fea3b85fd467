"""What a repeated call needs: its kind, by which its launches are found, and new memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from anabranch.launches.compile_ahead import AHEAD
from anabranch.launches.extension import load_launches

Kind = TypeVar("Kind")
Known = TypeVar("Known")
MOST_KINDS = 8192  # a step of prompts has its own number of tokens, and so its own kinds
_core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_fast: Callable[..., torch.Tensor] | None = getattr(
    _core._dynamo.guards, "_empty_strided_cuda", None
)
_current_device: Callable[[], int] | None = getattr(_core, "_cuda_getDevice", None)
_is_deterministic: Callable[[], bool] = _core._get_deterministic_algorithms


class Kinds(dict[Kind, Known]):
    """What is known of kinds, all of it forgotten when there are too many."""

    def keep(self, kind: Kind, known: Known) -> Known:
        """Remember what a kind of call needs."""
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = known
        return known


def describe(tensors: tuple[torch.Tensor | None, ...]) -> bytes | None:
    """Shapes, strides, dtypes, alignments and devices of tensors, and which of them are one.

    None under a tracer, without a C compiler, and while kernels are compiled ahead: then nothing
    is remembered of a call.
    """
    if torch.compiler.is_compiling() or AHEAD.get():
        return None
    launches = load_launches()
    return None if launches is None else launches.describe(tensors)


def are_apart(written: tuple[torch.Tensor, ...], read: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether tensors that were described before share no memory; what interleaves shares it."""
    launches = load_launches()
    return launches is not None and launches.is_apart(tuple(written), read)


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
