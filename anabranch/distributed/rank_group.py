"""The process group of a call: which rank this is, of how many, and whether all agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch.distributed as dist

from anabranch.distributed.collectives import all_gather_values

Made = TypeVar("Made")


class RankGroup(NamedTuple):
    """A group of torch.distributed and this process's place in it."""

    group: dist.ProcessGroup | None  # None is the default group
    rank: int
    num_ranks: int


def find_group(group: dist.ProcessGroup | None) -> RankGroup:
    """Refuse a group that is not initialised or that this process does not belong to."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"process {dist.get_rank()} does not belong to the group {group}")
    return RankGroup(group, rank, dist.get_world_size(group))


def check_agreement(ranks: RankGroup, **given: object) -> None:
    """Refuse values that differ between ranks, on every rank. Waits for all of them."""
    values = all_gather_values(given, ranks.num_ranks, ranks.group)
    for name in given:
        named = [value[name] for value in values]
        if any(value != named[0] for value in named):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(named))
            raise ValueError(f"{name} differs between ranks: {listed}")


def make_on_all(ranks: RankGroup | None, make: Callable[[], Made]) -> Made:
    """What `make` returns on this rank; where it fails on any rank, an error on every rank.

    `make` must not wait for other ranks. Without ranks it is only called.
    """
    if ranks is None:
        return make()
    made, error = None, None
    try:
        made = make()
    except Exception as raised:
        error = raised
    reasons = all_gather_values({"error": error and str(error)}, ranks.num_ranks, ranks.group)
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason["error"] is not None:
            raise ValueError(f"rank {rank} failed: {reason['error']}")
    return cast("Made", made)


def least_of_all(ranks: RankGroup | None, value: int) -> int:
    """The least value of all ranks, on every rank. Waits for all of them."""
    if ranks is None:
        return value
    values = all_gather_values({"value": value}, ranks.num_ranks, ranks.group)
    return min(cast("int", each["value"]) for each in values)
