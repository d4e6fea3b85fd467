"""Which drafted tokens are accepted, and what is emitted instead of the first that is not.

A proposal without probabilities is compared with what the target itself draws: the draft d is
accepted with probability p(d), and what was drawn is emitted either way. A proposal drawn from q
is accepted with probability min(1, p(d) / q(d)), or else replaced by a draw from max(p - q, 0).
Both emit tokens distributed as p. A greedy target is a p that holds one token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_equal(drawn: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts [num_seqs, max_drafts] equal what the target drew at their positions.

    `drawn` is [num_seqs, max_drafts + 1]; drafts from `num_drafts` [num_seqs] on are padding.
    """
    return _count_leading(drawn[:, :-1] == drafts, num_drafts)


def accept_by_ratio(
    weights: Tensor, drafts: Tensor, draft_probs: Tensor, num_drafts: Tensor, uniforms: Tensor
) -> Tensor:
    """How many drafts are accepted because their uniform is below p / q.

    `weights` [num_seqs, max_drafts + 1, vocab] are integers in proportion to p; `draft_probs`
    [num_seqs, max_drafts, vocab] is q, and `uniforms` [num_seqs, max_drafts] in [0, 1).
    """
    places = _padded_to_valid(drafts, num_drafts).unsqueeze(2)
    total = weights[:, :-1].sum(2, dtype=torch.int64).clamp_(min=1)
    p = weights[:, :-1].gather(2, places).squeeze(2).double() / total
    q = draft_probs.gather(2, places).squeeze(2)
    return _count_leading(uniforms * q < p, num_drafts)


def residual(
    weights: Tensor, draft_probs: Tensor, num_drafts: Tensor, num_accepted: Tensor
) -> Tensor:
    """What the token after the accepted ones is drawn from, [num_seqs, vocab], up to a factor.

    max(p - q, 0) after a rejection; p after the last draft, and where rounding left nothing.
    """
    vocab_size = weights.shape[2]
    position = num_accepted.view(-1, 1, 1).expand(-1, 1, vocab_size)
    p = weights.gather(1, position).squeeze(1)
    p = p / p.sum(1, keepdim=True, dtype=torch.int64).clamp_(min=1)
    last_draft = position.clamp(max=draft_probs.shape[1] - 1)
    q = draft_probs.gather(1, last_draft).squeeze(1)
    rejected = (num_accepted < num_drafts).unsqueeze(1)
    left = (p - q * rejected).clamp_(min=0)
    return torch.where(left.amax(1, keepdim=True) > 0, left, p)


def emit(drafts: Tensor, final: Tensor, num_accepted: Tensor) -> Tensor:
    """The accepted drafts, then `final` [num_seqs], then zeros: [num_seqs, max_drafts + 1]."""
    positions = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    last = num_accepted.unsqueeze(1)
    tokens = torch.where(positions < last, torch.nn.functional.pad(drafts, (0, 1)), 0)
    return torch.where(positions == last, final.unsqueeze(1), tokens)


def _count_leading(accepted: Tensor, num_drafts: Tensor) -> Tensor:
    return (accepted & _is_draft(accepted, num_drafts)).long().cumprod(1).sum(1)


def _is_draft(drafts: Tensor, num_drafts: Tensor) -> Tensor:
    return torch.arange(drafts.shape[1], device=drafts.device) < num_drafts.unsqueeze(1)


def _padded_to_valid(drafts: Tensor, num_drafts: Tensor) -> Tensor:
    return torch.where(_is_draft(drafts, num_drafts), drafts, 0)
