"""Products over packed weights on the CPU, and what happens to rows between them, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from anabranch.kernels.cpu.native import native

PANEL = 32  # outputs that lie side by side in packed weights


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] as [panels, k, 32], the last panel filled up with zeros."""
    n, k = weight.shape
    if n % PANEL:
        weight = functional.pad(weight, (0, 0, 0, -n % PANEL))
    return weight.view(-1, PANEL, k).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """[panels, k, 32] as [n, k]."""
    return packed.transpose(1, 2).flatten(0, 1)[:n].contiguous()


def packed_rows(packed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the weight [n, k] that was packed: [*rows.shape, k]."""
    return packed[rows // PANEL, :, rows % PANEL]


def packed_linear(
    x: torch.Tensor,  # [..., k]
    packed: torch.Tensor,  # [panels, k, 32]
    n: int,
    bias: torch.Tensor | None,  # [n]
) -> torch.Tensor:
    """x @ weight.T + bias, [..., n]; a row has the same bits whatever other rows there are."""
    x = x if x.is_contiguous() else x.contiguous()
    k = packed.shape[1]
    y = x.new_empty(*x.shape[:-1], n)
    native().packed_linear(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None,
        y.data_ptr(),
        x.numel() // k,
        n,
        k,
        torch.get_num_threads(),
    )
    return y


def silu_gate(joined: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., n], where `joined` [..., 2 n] is gate before up, contiguous."""
    n = joined.shape[-1] // 2
    y = joined.new_empty(*joined.shape[:-1], n)
    rows = joined.numel() // (2 * n)
    native().silu_gate(joined.data_ptr(), y.data_ptr(), rows, n, torch.get_num_threads())
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x [..., n] over the root of their mean square, times weight [n]."""
    x = x if x.is_contiguous() else x.contiguous()
    y, n = torch.empty_like(x), x.shape[-1]
    rows, threads = x.numel() // n, torch.get_num_threads()
    native().rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, n, epsilon, threads)
    return y
