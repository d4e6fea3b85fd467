"""Linear layers on a CPU by torch's products, where PackedLinear cannot be compiled."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MAX_FEW_ROWS = 8
# Numbers of rows for packed weights, which are faster from the first on: oneDNN makes and keeps
# code and memory for each (about 1 MB and 1 ms a weight), so there must be few.
PACKED_ROWS = (4, 5, 6, 7, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class CpuLinear(nn.Linear):
    """nn.Linear on a CPU without a C compiler: few rows by a batched product, weights first.

    More rows go to oneDNN, over a copy of the weights in its own order, where memory allows one.
    All products of SmolLM2-135M for one step on two cores of an EPYC, float32, milliseconds by
    nn.Linear with MKL / weights first / oneDNN: 1 row 46 / 16 / 23, 4 rows 63 / 24 / 19, 8 rows
    56 / 42 / 22, 40 rows 110 / 98 / 64, 312 rows 549 / 518 / 435.
    """

    packed: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x @ weight.T + bias."""
        x = input.reshape(-1, self.in_features)
        if self.packed is not None and len(x) >= PACKED_ROWS[0]:
            starts = range(0, len(x), PACKED_ROWS[-1])
            pieces = [self._by_packed(x[start : start + PACKED_ROWS[-1]]) for start in starts]
            y = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            return y.view(*input.shape[:-1], self.out_features)
        shares = self._shares(len(x))
        if not shares:
            return functional.linear(input, self.weight, self.bias)
        weights = self.weight.view(shares, -1, self.in_features)
        y = torch.bmm(weights, x.t().expand(shares, -1, -1)).view(self.out_features, -1)
        y = y.t().contiguous()
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            y += self.bias
        return y.view(*input.shape[:-1], self.out_features)

    def _by_packed(self, x: torch.Tensor) -> torch.Tensor:
        rows = PACKED_ROWS[bisect_left(PACKED_ROWS, len(x))]
        padded = x if len(x) == rows else functional.pad(x, (0, 0, 0, rows - len(x)))
        y = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        return y[: len(x)]

    def pack(self) -> None:
        """Make the copy of the weights, which are not to be changed in place afterwards."""
        weight = self.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2 * MAX_FEW_ROWS)

    def _apply(self, fn: Any, recurse: bool = True) -> CpuLinear:
        """Moved or converted weights have no copy."""
        self.packed = None
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a layer make their own copy of the weights, or none."""
        return {name: value for name, value in self.__dict__.items() if name != "packed"}

    def _shares(self, num_rows: int) -> int:
        """Into how many parts to cut the outputs; 0 where nn.Linear is faster."""
        most = MAX_FEW_ROWS if self.out_features >= self.in_features else MAX_FEW_ROWS // 2
        if not 1 <= num_rows <= most:
            return 0
        wanted = max(torch.get_num_threads(), 2)
        return next((n for n in (wanted, 2) if self.out_features % n == 0), 0)


def has_onednn() -> bool:
    """Whether this torch has oneDNN, and lets others than its own compiler use it."""
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )
