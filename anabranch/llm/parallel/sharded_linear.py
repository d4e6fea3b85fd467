"""Linear maps of which each rank holds a part: of the inputs, summed, or of the outputs, gathered.

A map of which a rank keeps its own outputs only is a plain linear map with fewer of them. Compiled
code sums by an operator, which finds the group by its number.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from anabranch.distributed.collectives import all_gather, all_reduce
from anabranch.distributed.rank_group import RankGroup

_groups: list[dist.ProcessGroup | None] = []  # by number


def take_rows(linear: nn.Linear, rows: slice) -> nn.Linear:
    """A linear map with these outputs only, in memory of its own."""
    bias = linear.bias if _has_bias(linear) else None
    return _linear(linear.weight[rows], None if bias is None else bias[rows])


class SummedLinear(nn.Module):
    """A linear map cut by its inputs: every rank multiplies its own, and the products are added.

    With `takes_all`, a rank is given all inputs and takes its own of them.
    """

    def __init__(
        self, linear: nn.Linear, columns: slice, ranks: RankGroup, *, takes_all: bool = False
    ) -> None:
        super().__init__()
        self._taken = columns if takes_all else slice(None)
        self.linear = _linear(linear.weight[:, columns], None)
        self.bias = None
        if _has_bias(linear):
            self.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        if ranks.group not in _groups:
            _groups.append(ranks.group)
        self._group, self._number = ranks.group, _groups.index(ranks.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x[..., self._taken]).contiguous()
        if torch.compiler.is_compiling():
            out = cast("torch.Tensor", torch.ops.anabranch.sum_over_ranks(out, self._number))
        else:
            all_reduce(out, self._group)
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear map cut by its outputs, which all ranks get; the last ranks may have padding."""

    def __init__(self, linear: nn.Linear, ranks: RankGroup) -> None:
        super().__init__()
        self.out_features = linear.out_features
        share = -(-linear.out_features // ranks.num_ranks)
        start = min(ranks.rank * share, linear.out_features)
        own = take_rows(linear, slice(start, min(start + share, linear.out_features)))
        self.linear = _pad_rows(own, share)
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.linear(x).contiguous()
        shape = (self._ranks.num_ranks, *own.shape)
        parts = torch.empty(shape, dtype=own.dtype, device=own.device)
        all_gather(parts.view(self._ranks.num_ranks, -1), own.view(1, -1), self._ranks.group)
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]


def _pad_rows(linear: nn.Linear, count: int) -> nn.Linear:
    missing = count - linear.out_features
    if not missing:
        return linear
    weight = nn.functional.pad(linear.weight, (0, 0, 0, missing))
    bias = nn.functional.pad(linear.bias, (0, missing)) if _has_bias(linear) else None
    return _linear(weight, bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made


def _has_bias(linear: nn.Linear) -> bool:
    return linear.bias is not None  # pyright: ignore[reportUnnecessaryComparison]


@torch.library.custom_op("anabranch::sum_over_ranks", mutates_args=())
def _sum_over_ranks_op(x: torch.Tensor, number: int) -> torch.Tensor:
    summed = x.clone()
    all_reduce(summed, _groups[number])
    return summed


@_sum_over_ranks_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    del number
    return torch.empty_like(x)
