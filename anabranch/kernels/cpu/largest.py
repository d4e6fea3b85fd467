"""The largest number of every row, in one pass over it."""

from __future__ import annotations

import torch

from anabranch.kernels.cpu.native import native


def find_largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the first of the largest numbers of each row is, int64 [rows], and float32 [rows, 2].

    These are that number, in which NaN counts as -inf, and the largest of the row, NaN where one
    is. x is float32 [rows, n], contiguous.
    """
    rows, n = x.shape
    places, peaks = torch.empty(rows, dtype=torch.int64), torch.empty(rows, 2)
    native().find_largest(
        x.data_ptr(), places.data_ptr(), peaks.data_ptr(), rows, n, torch.get_num_threads()
    )
    return places, peaks
