"""Moving rows of a cache on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def move_rows(
    stores: Sequence[torch.Tensor],  # bytes [num_slots, row_bytes] each
    slots: torch.Tensor,  # int64 [num_seqs, width]
    path: torch.Tensor,  # int64 [num_seqs, width], ascending
    num_accepted: torch.Tensor,  # int64 [num_seqs]
) -> None:
    """Copy the row of each accepted node to the slot of its depth; sources are read first."""
    depths = torch.arange(path.shape[1])
    is_moved = (depths <= num_accepted[:, None]) & (path != depths)
    source, target = slots.gather(1, path)[is_moved], slots[is_moved]
    if not len(source):
        return
    for rows in stores:
        rows[target] = rows[source]
