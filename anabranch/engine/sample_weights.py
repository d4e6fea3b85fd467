"""Token weights: a distribution over the vocabulary as integers, its filters, and drawing from it.

A weight is the probability over that of the likeliest token, in whole units of 2^-30. Sums of
integers do not depend on their order, so what is kept and what is drawn is the same to the last
bit whatever kernel torch chooses for the batch. Every filter keeps the tokens above a bound, and
ties with the last one kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

UNIT = 2.0**30
_DRAW_BLOCK = 128
_BIN_BITS = 12
_NUM_BINS = 1 << _BIN_BITS
# Scores more than ln(2^30) below the peak have weight 0; the rest is cut into 2^24 fine bins.
_FINE_BINS_A_NAT = (_NUM_BINS * _NUM_BINS - 1) / math.log(UNIT)


def weights_of(log_weights: Tensor) -> Tensor:
    """int32 weights [rows, vocab] of logarithms that are at most 0, which are overwritten."""
    return log_weights.exp_().mul_(UNIT).to(torch.int32)


def weights_of_probs(probs: Tensor) -> Tensor:
    """int32 weights [rows, vocab] of probabilities up to a factor; a row of zeros stays one."""
    peak = probs.amax(1, keepdim=True).clamp_(min=torch.finfo(probs.dtype).tiny)
    return (probs / peak).mul_(UNIT).to(torch.int32)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """The weights [rows, vocab] that hold one token only."""
    weights = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.int32, device=tokens.device)
    return weights.scatter_(1, tokens.unsqueeze(1), int(UNIT))


def keep_above(log_weights: Tensor, bounds: Tensor) -> Tensor:
    """Drops what is below `bounds` [rows], in place."""
    return log_weights.masked_fill_(log_weights < bounds.unsqueeze(1), -torch.inf)


def top_k_bounds(log_weights: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """The `top_k`-th largest logarithm of each row; -inf where `top_k` [rows] is 0."""
    largest = log_weights.topk(largest_k).values
    last = largest.gather(1, (top_k.long() - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(top_k > 0, last, -torch.inf)


def fine_bins(log_weights: Tensor) -> Tensor:
    """Bins of logarithms in which `keep_top_p` sums; they resolve 1.2e-6 nats."""
    return (log_weights * -_FINE_BINS_A_NAT).clamp_(max=_NUM_BINS * _NUM_BINS - 1).int()


def keep_top_p(weights: Tensor, bins: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the likeliest tokens that together hold `top_p` [rows] of all weight, in place.

    Rather than sorting, the weight in coarse bins is summed, then the weight in the fine bins of
    the coarse one in which the bound lies.
    """
    left = weights.long()
    coarse = bins >> _BIN_BITS
    sums = _bin_sums(coarse, left)
    wanted = (sums.sum(1, keepdim=True) * top_p.unsqueeze(1)).ceil_().long()
    outer, before = _crossing(sums, wanted)
    left.masked_fill_(coarse != outer.int(), 0)
    inner, _ = _crossing(_bin_sums(bins & (_NUM_BINS - 1), left), wanted - before)
    return weights.masked_fill_(bins > (outer * _NUM_BINS + inner).int(), 0)


def filtered_weights(log_weights: Tensor, bounds: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The weights of what is above `bounds` and within `top_p` of it; overwrites the logarithms."""
    if bounds is not None:
        keep_above(log_weights, bounds)
    if top_p is None:
        return weights_of(log_weights)
    bins = fine_bins(log_weights)
    return keep_top_p(weights_of(log_weights), bins, top_p)


def greedy_or(weights: Tensor, best: Tensor, greedy: Tensor) -> Tensor:
    """The weights, those of `greedy` [rows] on the best token alone."""
    return torch.where(greedy.unsqueeze(1), one_hot(best, weights.shape[1]), weights)


def _bin_sums(bins: Tensor, weights: Tensor) -> Tensor:
    sums = weights.new_zeros(weights.shape[0], _NUM_BINS)
    # Tokens without weight may be anywhere: in one bin, their additions would wait for each other.
    anywhere = torch.arange(weights.shape[1], device=weights.device) & (_NUM_BINS - 1)
    return sums.scatter_add_(1, torch.where(weights > 0, bins, anywhere), weights)


def _crossing(sums: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first bin at which the running sum reaches `wanted`, and the sum before that bin."""
    running = sums.cumsum(1)
    bins = torch.searchsorted(running, wanted).clamp_(max=sums.shape[1] - 1)
    return bins, running.gather(1, bins) - sums.gather(1, bins)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token [rows] at which the running weight passes `uniforms` [rows] of the total.

    The block of the vocabulary is found first, then the token in it. A row without weight gives
    token 0.
    """
    num_rows, vocab_size = weights.shape
    if missing := -vocab_size % _DRAW_BLOCK:
        weights = pad(weights, (0, missing))
    blocks = weights.view(num_rows, -1, _DRAW_BLOCK)
    running = blocks.sum(2, dtype=torch.int64).cumsum_(1)
    total = running[:, -1:]
    target = torch.minimum((uniforms.unsqueeze(1) * total).long(), total - 1)
    block = torch.searchsorted(running, target, right=True)
    rows = torch.arange(num_rows, device=weights.device).unsqueeze(1)
    inside = blocks[rows, block].squeeze(1).cumsum(1, dtype=torch.int64)
    start = running.gather(1, block) - inside[:, -1:]
    offset = torch.searchsorted(inside, target - start, right=True)
    return (block * _DRAW_BLOCK + offset).squeeze(1)
