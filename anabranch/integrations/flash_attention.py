"""flash-attention: LSE in natural log, heads before tokens.

[batch, heads, tokens], or [heads, tokens] for packed sequences (flash_attn_interface.py, since
2.6). A row without keys has +inf in version 2 (csrc/flash_attn/src/softmax.h), -inf in versions 3
and 4 (hopper/softmax.h).
"""

from __future__ import annotations

import torch

from anabranch.integrations.empty_rows import clear_rows
from anabranch.shapes import Sizes
from anabranch.state import AttentionState


def from_flash_attention(out: torch.Tensor, softmax_lse: torch.Tensor) -> AttentionState:
    """The state of `out` [(batch,) tokens, heads, dim], `softmax_lse` [(batch,) heads, tokens]."""
    sizes, batch = Sizes(), "batch " * (out.dim() == 4)
    sizes.match("out", out, f"{batch}tokens heads head_dim")
    sizes.match("softmax_lse", softmax_lse, f"{batch}heads tokens")
    return clear_rows(out, softmax_lse.mT, softmax_lse.mT.isinf())


def to_flash_attention(state: AttentionState) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) as views; rows without keys have -inf, as in versions 3 and 4."""
    return state.out, state.lse.mT
