"""Sources that keep keys in one tensor and values in another."""

from __future__ import annotations

import torch

from anabranch.keys.source import KeySource
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype


class KeysAndValues(KeySource):
    """A source whose fields `k` and `v` end in [num_kv_heads, head_dim]."""

    __slots__ = ()
    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        """Heads of a key."""
        return self.k.shape[-2]

    @property
    def head_dim_k(self) -> int:
        """Columns of a head of a key."""
        return self.k.shape[-1]

    @property
    def head_dim_v(self) -> int:
        """Columns of a head of a value."""
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self.k.device


def check_pair(k: torch.Tensor, v: torch.Tensor, rows: str) -> Sizes:
    """Refuse keys and values that do not go together; their sizes by name."""
    sizes = Sizes()
    sizes.match("k", k, f"{rows} num_kv_heads head_dim_k")
    sizes.match("v", v, f"{rows} num_kv_heads head_dim_v")
    check_dtype("k", k, FLOATS)
    check_dtype("v", v, (k.dtype,))
    check_device("v", v, k.device)
    return sizes


def check_index(argument: str, index: torch.Tensor, device: torch.device) -> None:
    """Refuse lengths or tables that kernels cannot read."""
    check_dtype(argument, index, (torch.int32,))
    check_device(argument, index, device)
    if index.dim() and index.shape[-1] > 1 and index.stride(-1) != 1:
        need = f"{argument} must be contiguous in its last dimension"
        raise ValueError(f"{need}, got strides {index.stride()}")
