"""Rows that attended to no key: however a library marks them, here out is 0 and lse -inf."""

from __future__ import annotations

import torch

from anabranch.shapes import check_dtype
from anabranch.state import AttentionState


def clear_rows(out: torch.Tensor, lse: torch.Tensor, empty: torch.Tensor) -> AttentionState:
    """The state (out, lse) with the rows of `empty` made empty, whatever they hold."""
    check_dtype("lse", lse, (torch.float32,))
    return AttentionState(out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf))
