"""States of several ranks in one buffer of bytes, so that one collective moves them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from anabranch.distributed.collectives import all_gather, all_to_all
from anabranch.state import AttentionState

ALIGNMENT = 16  # bytes, for the wide loads of the merge


class StateBuffer(NamedTuple):
    """One state for each of `num_ranks` ranks: all outputs of a rank, then all its LSEs."""

    data: torch.Tensor  # uint8 [num_ranks, bytes of a state]
    shape: tuple[int, ...]  # of a state's output
    dtype: torch.dtype

    @staticmethod
    def allocate(
        num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> StateBuffer:
        """A buffer whose states are not initialised."""
        rows = torch.Size(shape[:-1]).numel()
        size = _align(rows * shape[-1] * dtype.itemsize) + _align(rows * 4)
        size = max(size, ALIGNMENT)  # no bytes at all have no stride to view them by
        data = torch.empty(num_ranks, size, dtype=torch.uint8, device=device)
        return StateBuffer(data, shape, dtype)

    def like(self, num_ranks: int) -> StateBuffer:
        """A buffer for the same states of so many ranks, not initialised."""
        return StateBuffer.allocate(num_ranks, self.shape, self.dtype, self.data.device)

    def states(self) -> AttentionState:
        """Views of the states, out [num_ranks, *shape]."""
        rows = torch.Size(self.shape[:-1]).numel()
        out_bytes = rows * self.shape[-1] * self.dtype.itemsize
        out = self.data[:, :out_bytes].view(self.dtype)
        start = _align(out_bytes)
        lse = self.data[:, start : start + rows * 4].view(torch.float32)
        return AttentionState(out.unflatten(1, self.shape), lse.unflatten(1, self.shape[:-1]))

    def exchange(self, group: dist.ProcessGroup | None) -> StateBuffer:
        """State i of this rank goes to rank i; returns what the ranks sent to this one."""
        received = self.like(self.data.shape[0])
        all_to_all(received.data, self.data, group)
        return received

    def gather(self, group: dist.ProcessGroup | None, num_ranks: int) -> StateBuffer:
        """The only state of each rank, on all ranks."""
        gathered = self.like(num_ranks)
        all_gather(gathered.data, self.data, group)
        return gathered


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
