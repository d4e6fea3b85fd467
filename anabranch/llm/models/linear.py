"""Linear layers of a model by the products that are fast on their device."""

from __future__ import annotations

import torch
from torch import nn

from anabranch.kernels.cpu.native import native
from anabranch.llm.models.packed_linear import pack_layers
from anabranch.llm.models.row_linear import linear


class RowLinear(nn.Linear):
    """nn.Linear on a GPU: one row by the library's own product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
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
