"""linear(), gated_linear(): checks, choice of implementation, torch operators; no device code."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from anabranch.device import has_overlap
from anabranch.kernels.cpu.native import native
from anabranch.kernels.layers.linear_config import LinearConfig, fit_linear, select_linear
from anabranch.llm.models.cpu_layers import pack_layers
from anabranch.shapes import Sizes, check_device, check_dtype


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ w.T + bias`, at the speed of memory where x is one row.

    x     [..., k]
    w     [n, k]
    bias  [n]

    On a GPU, one row in 16 bits goes to a kernel of ours, summed in float32; everything else is
    torch's.
    """
    _check(x, w, bias)
    if x.numel() != x.shape[-1]:
        return functional.linear(x, w, bias)
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.linear(x, w, bias)
    return _linear(x, w, bias)


def gated_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, where w [2 n, k] is gate above up."""
    _check(x, w, None)
    if w.shape[0] % 2:
        raise ValueError(f"w must hold as many rows of gate as of up, got {w.shape[0]}")
    if x.numel() != x.shape[-1]:
        return _gate(functional.linear(x, w))
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.gated_linear(x, w)
    return _gated_linear(x, w)


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
    """The configuration for one row, or None where torch's product is to be used."""
    if x.device.type != "cuda" or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    aligned = w.stride(1) == 1 and w.stride(0) % 8 == 0 and w.data_ptr() % 16 == 0
    n, k = w.shape
    config = select_linear(1, n, k, x.element_size()) if aligned else None
    return None if config is None else fit_linear(config, hopper=has_overlap(x.device))


def _row(x: torch.Tensor) -> torch.Tensor:
    row = x.reshape(-1)
    return row.clone() if row.data_ptr() % 16 else row


def _gate(joined: torch.Tensor) -> torch.Tensor:
    size = joined.shape[-1] // 2
    return functional.silu(joined[..., :size]) * joined[..., size:]


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    config = choose(x, w)
    if config is None:
        return functional.linear(x, w, bias)
    from anabranch.kernels.layers.linear import linear as launch

    y = x.new_empty(w.shape[0])
    launch(_row(x), w, None if bias is None else bias.contiguous(), y, config)
    return y.view(*x.shape[:-1], -1)


def _gated_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    config = choose(x, w)
    if config is None:
        return _gate(functional.linear(x, w))
    from anabranch.kernels.layers.linear import linear as launch

    y = x.new_empty(w.shape[0] // 2)
    launch(_row(x), w, None, y, config, gated=True)
    return y.view(*x.shape[:-1], -1)


_linear_op = torch.library.custom_op("anabranch::linear", _linear, mutates_args=())


@_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], w.shape[0])


_gated_linear_op = torch.library.custom_op(
    "anabranch::gated_linear", _gated_linear, mutates_args=()
)


@_gated_linear_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0] // 2)


class RowLinear(nn.Linear):
    """nn.Linear on a GPU: one row by the library's own product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


def use_row_linear(model: nn.Module) -> int:
    """Let plain linear layers of a model use what is fast on their device, in place; how many."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    on_gpu = [x for x in layers if x.weight.is_cuda and x.weight.itemsize == 2]
    on_cpu = [
        layer
        for layer in layers
        if layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
    ]
    for layer in on_gpu:
        layer.__class__ = RowLinear
    if native() is None:
        on_cpu = []  # torch's products
    if on_cpu:
        pack_layers(model, on_cpu)
    return len(on_gpu) + len(on_cpu)
