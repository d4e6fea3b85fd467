"""Which drafted tokens are accepted, and what is emitted after them.

The target draws its own token at every position, with noise that depends on the seed and the
position only. A draft is accepted while it equals that token, so the tokens emitted are the
target's own whatever was drafted. A draft model draws with the same noise: it is right with
probability (1 - d) / (1 + d) or more, where d is the total variation distance of the two
distributions, and 1 - d is the most that any rule can accept.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_equal(drawn: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts [num_seqs, max_drafts] equal what the target drew at their positions.

    `drawn` is [num_seqs, max_drafts + 1]; drafts from `num_drafts` [num_seqs] on are padding.
    """
    is_draft = torch.arange(drafts.shape[1], device=drafts.device) < num_drafts.unsqueeze(1)
    return ((drawn[:, :-1] == drafts) & is_draft).long().cumprod(1).sum(1)


def emit(drawn: Tensor, num_accepted: Tensor) -> Tensor:
    """What the target drew, up to one token after the accepted ones, then zeros."""
    positions = torch.arange(drawn.shape[1], device=drawn.device)
    return torch.where(positions <= num_accepted.unsqueeze(1), drawn, 0)
