"""linear(): checks, choice of implementation, and the torch operator; no device code."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch.nn import functional

from anabranch.kernels.linear_config import LinearConfig, fit_linear, select_linear
from anabranch.shapes import Sizes, check_device, check_dtype


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ w.T + bias`, at the speed of memory where x has few rows.

    x     [..., k]
    w     [n, k]
    bias  [n]

    On a GPU, products in 16 bits with one or two rows go to a kernel of ours, summed in float32;
    everything else is torch's.
    """
    _check(x, w, bias)
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.linear(x, w, bias)
    return _linear(x, w, bias)


def _check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not x.ndim:
        raise ValueError("x must have at least one dimension, got a scalar")
    sizes = Sizes()
    sizes.match("w", w, "n k")
    sizes.bind("k", x.shape[-1], "x")
    check_dtype("x", x, (w.dtype,))
    check_device("x", x, w.device)
    if bias is not None:
        sizes.match("bias", bias, "n")
        check_dtype("bias", bias, (w.dtype,))
        check_device("bias", bias, w.device)
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; linear is for inference, detach it")


def choose(x: torch.Tensor, w: torch.Tensor) -> LinearConfig | None:
    """The configuration for rows [num_rows, k], or None where torch's product is to be used."""
    if x.device.type != "cuda" or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    n, k = w.shape
    config = select_linear(x.shape[0], n, k, x.element_size()) if aligned else None
    if config is None:
        return None
    return fit_linear(config, hopper=_is_hopper(x.device))


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Whether it is a Hopper GPU or a later one."""
    properties = cast("Any", torch.cuda.get_device_properties)(device)  # pyright: ignore
    return torch.version.hip is None and properties.major >= 9


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    config = choose(rows, w)
    if config is None:
        return functional.linear(x, w, bias)
    from anabranch.kernels.triton.linear import linear as launch

    overlapping = rows.stride(0) < rows.shape[1]
    if overlapping or rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 16:
        rows = rows.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty(rows.shape[0], w.shape[0])
    launch(rows, w, bias, y, config)
    return y.view(*x.shape[:-1], w.shape[0])


@torch.library.custom_op("anabranch::linear", mutates_args=())
def _linear_op(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _linear(x, w, bias)


@_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], w.shape[0])
