"""The collectives of torch.distributed that this package uses, with types, for all its versions."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

_dist = cast("Any", dist)
# torch 2.13 warns of the name that torch 2.11 has
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def all_to_all(output: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Row i of `sent` goes to rank i; row i of `output` comes from rank i."""
    _dist.all_to_all_single(output, sent, group=group)


def all_gather(output: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Row i of `output` is the only row that rank i sends."""
    getattr(_dist, _GATHER)(output, sent, group=group)


def all_gather_values(
    value: dict[str, object], num_ranks: int, group: dist.ProcessGroup | None
) -> list[dict[str, object]]:
    """What each rank passes, on every rank. Waits for all of them."""
    values: list[dict[str, object]] = [{}] * num_ranks
    _dist.all_gather_object(values, value, group=group)
    return values


def all_reduce(summed: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum over ranks, in place, to the same bits on all of them."""
    _dist.all_reduce(summed, group=group)


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Overwrite a tensor by that of the group's rank 0, in place."""
    _dist.broadcast(tensor, group=group, group_src=0)
