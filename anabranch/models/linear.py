"""Linear layers of a model at the speed of memory when there are few rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from anabranch.linear import linear

MAX_FEW_ROWS = 8


class RowLinear(nn.Linear):
    """nn.Linear on a GPU: one row by the library's own product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        return linear(input, self.weight, self.bias)


class CpuLinear(nn.Linear):
    """nn.Linear on a CPU: few rows by a batched product, weights first, a share for each thread.

    Microseconds on two cores of an EPYC with MKL, float32, as nn.Linear / so, for 1, 4 and 8 rows:
    576 -> 3072 618 / 218, 817 / 261, 705 / 490; 1536 -> 576 220 / 105, 362 / 240, 299 / 364;
    576 -> 49152 9781 / 3349, 16549 / 4424, 16210 / 7178. One row reads 31 to 39 GB/s that way.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        x = input.reshape(-1, self.in_features)
        shares = self._shares(len(x))
        if not shares:
            return functional.linear(input, self.weight, self.bias)
        weights = self.weight.view(shares, -1, self.in_features)
        y = torch.bmm(weights, x.t().expand(shares, -1, -1)).view(self.out_features, -1)
        y = y.t().contiguous()
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            y += self.bias
        return y.view(*input.shape[:-1], self.out_features)

    def _shares(self, num_rows: int) -> int:
        """Into how many parts to cut the outputs; 0 where nn.Linear is faster."""
        most = MAX_FEW_ROWS if self.out_features >= self.in_features else MAX_FEW_ROWS // 2
        if not 1 <= num_rows <= most:
            return 0
        wanted = max(torch.get_num_threads(), 2)
        return next((n for n in (wanted, 2) if self.out_features % n == 0), 0)


def use_row_linear(model: nn.Module) -> int:
    """Let plain linear layers of a model use what is fast on their device, in place; how many."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    on_gpu = [x for x in layers if x.weight.is_cuda and x.weight.itemsize == 2]
    on_cpu = [
        layer
        for layer in layers
        if layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.is_contiguous()
    ]
    for layer in on_gpu:
        layer.__class__ = RowLinear
    for layer in on_cpu:
        layer.__class__ = CpuLinear
    return len(on_gpu) + len(on_cpu)
