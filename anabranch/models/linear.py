"""Linear layers of a model at the speed of memory when there are few rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from anabranch.linear import linear

MAX_TRANSPOSED_BYTES = 2 << 30  # of weights that a CPU keeps in a second layout
MAX_FEW_ROWS = 6


class RowLinear(nn.Linear):
    """nn.Linear on a GPU: one row by the library's own product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return linear(input, self.weight, self.bias)


class CpuLinear(nn.Linear):
    """nn.Linear on a CPU: a few rows in the order in which BLAS reads weights fastest.

    Microseconds on one core of an EPYC, float32, for 1, 2, 5 and 8 rows, 576 -> 3072: as nn.Linear
    571, 982, 884, 903; by a transposed weight 322, 510, 1026, 1035; weight first 574, 373, 656,
    899. 1536 -> 576: as nn.Linear 213, 332, 382, 401, the others slower but for two rows.
    """

    transposed: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        x = input.reshape(-1, self.in_features)
        if len(x) == 1 and self.transposed is not None:
            y = torch.mm(x, self.transposed)
        elif 1 < len(x) <= MAX_FEW_ROWS:
            y = torch.mm(self.weight, x.t()).t().contiguous()
        else:
            return functional.linear(input, self.weight, self.bias)
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            y = y + self.bias
        return y.reshape(*input.shape[:-1], self.out_features)


def use_row_linear(model: nn.Module) -> int:
    """Let every plain linear layer of a model use what is fast on its device, in place; how many.

    A CPU keeps weights of more outputs than inputs in a second layout, if the model is small.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    on_gpu = [x for x in layers if x.weight.is_cuda and x.weight.itemsize == 2]
    on_cpu = [
        layer
        for layer in layers
        if layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.out_features >= layer.in_features
    ]
    small = sum(layer.weight.nbytes for layer in on_cpu) <= MAX_TRANSPOSED_BYTES
    for layer in on_gpu:
        layer.__class__ = RowLinear
    for layer in on_cpu:
        layer.__class__ = CpuLinear
        copy = layer.weight.detach().t().contiguous() if small else None
        layer.register_buffer("transposed", copy, persistent=False)
    return len(on_gpu) + len(on_cpu)
