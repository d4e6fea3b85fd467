"""Which drafted tokens are accepted, and what is emitted after them.

The target draws its own token at every position, with noise that depends on the seed and the
position only. A draft is accepted while it equals that token, so the tokens emitted are the
target's own whatever was drafted. A draft model draws with the same noise: it is right with
probability (1 - d) / (1 + d) or more, where d is the total variation distance of the two
distributions, and 1 - d is the most that any rule can accept.

In a tree of drafts the same rule is a walk: from the last token to the child that equals the token
drawn there, and on from that child, until there is none.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Verified(NamedTuple):
    """What verification of drafts gives."""

    tokens: Tensor  # [num_seqs, max_drafts + 1]: emitted, then zeros
    num_accepted: Tensor  # [num_seqs]
    path: Tensor | None = None  # for trees, [num_seqs, max_drafts + 1]: the node of each token


def walk_trees(
    drawn: Tensor,  # [num_seqs, width]: by the target, after each node; node 0 is the last token
    drafts: Tensor,  # [num_seqs, width - 1]: tokens of the other nodes
    num_drafts: Tensor,  # [num_seqs]: from there on nodes are padding
    above: Tensor,  # [num_seqs, width]: parents as nodes; that of node 0 is itself
    depths: Tensor,  # [num_seqs, width]
    deepest: int,
) -> Verified:
    """Accept the path whose every node equals the token drawn at its parent.

    `path` beyond the accepted nodes counts on. Where siblings are equal, either is accepted: their
    tokens, positions and ancestors are the same, and so are their keys.
    """
    nodes = torch.arange(drawn.shape[1], device=drawn.device)
    is_right = drawn.gather(1, above)[:, 1:] == drafts
    is_right &= nodes[:-1] < num_drafts.unsqueeze(1)
    reached = torch.cat([torch.ones_like(is_right[:, :1]), is_right], 1)
    for _ in range((deepest - 1).bit_length()):  # a node looks twice as far up each time
        reached = reached & reached.gather(1, above)
        above = above.gather(1, above)
    places = torch.where(reached, depths, drawn.shape[1])
    path = torch.cat([nodes, nodes[:1]]).repeat(len(drawn), 1)
    path = path.scatter_(1, places, nodes.expand_as(drawn))[:, :-1]
    num_accepted = torch.where(reached, depths, 0).amax(1)
    return Verified(emit(drawn.gather(1, path), num_accepted), num_accepted, path)
