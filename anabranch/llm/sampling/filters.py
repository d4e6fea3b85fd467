"""Filters: which tokens may be drawn, by logarithms of weights relative to the likeliest token.

Every filter keeps the tokens above a bound, and ties with the last one kept; the others get -inf.
`top_p` sums weights as integers in units of 2^-30 of the likeliest token's: such sums do not
depend on their order, so what is kept is the same to the last bit whatever kernel torch chooses
for the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNIT = 2.0**30
_BIN_BITS = 12
_NUM_BINS = 1 << _BIN_BITS
_LAST_BIN = _NUM_BINS * _NUM_BINS - 1
# Logarithms below -ln(2^30) have weight 0; the rest is cut into 2^24 fine bins.
_FINE_BINS_A_NAT = _LAST_BIN / math.log(UNIT)


def keep_above(log_weights: Tensor, bounds: Tensor) -> Tensor:
    """Drop what is below `bounds` [rows], in place."""
    return log_weights.masked_fill_(log_weights < bounds.unsqueeze(1), -torch.inf)


def top_k_bounds(log_weights: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """The `top_k`-th largest logarithm of each row; -inf where `top_k` [rows] is 0."""
    largest = log_weights.topk(largest_k).values
    last = largest.gather(1, (top_k.long() - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(top_k > 0, last, -torch.inf)


def keep_top_p(log_weights: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens that together hold `top_p` [rows] of all weight, in place.

    Rather than sorting, the weight in coarse bins is summed, then the weight in the fine bins of
    the coarse one in which the bound lies. A `top_p` of 1 keeps everything.
    """
    bins = _fine_bins(log_weights)
    left = log_weights.exp().mul_(UNIT).long()
    coarse = bins >> _BIN_BITS
    sums = _bin_sums(coarse, left)
    wanted = (sums.sum(1, keepdim=True) * top_p.unsqueeze(1)).ceil_().long()
    outer, before = _crossing(sums, wanted)
    left.masked_fill_(coarse != outer.int(), 0)
    inner, _ = _crossing(_bin_sums(bins & (_NUM_BINS - 1), left), wanted - before)
    last = torch.where(top_p.unsqueeze(1) < 1, outer * _NUM_BINS + inner, _LAST_BIN)
    return log_weights.masked_fill_(bins > last.int(), -torch.inf)


def apply_filters(log_weights: Tensor, bounds: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep what is above `bounds`, and of that what is within `top_p`, in place."""
    if bounds is not None:
        keep_above(log_weights, bounds)
    return log_weights if top_p is None else keep_top_p(log_weights, top_p)


def _fine_bins(log_weights: Tensor) -> Tensor:
    """Bins that resolve 1.2e-6 nats."""
    return (log_weights * -_FINE_BINS_A_NAT).clamp_(max=_LAST_BIN).int()


def _bin_sums(bins: Tensor, weights: Tensor) -> Tensor:
    sums = weights.new_zeros(weights.shape[0], _NUM_BINS)
    # Tokens without weight are spread out: in one bin, their additions would wait for each other.
    anywhere = torch.arange(weights.shape[1], device=weights.device) & (_NUM_BINS - 1)
    return sums.scatter_add_(1, torch.where(weights > 0, bins, anywhere), weights)


def _crossing(sums: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first bin at which the running sum reaches `wanted`, and the sum before that bin."""
    running = sums.cumsum(1)
    bins = torch.searchsorted(running, wanted).clamp_(max=sums.shape[1] - 1)
    return bins, running.gather(1, bins) - sums.gather(1, bins)
