"""From logits to a token: biases, bans, penalties and temperature, then filters, then a draw.

A logit that is NaN counts as -inf wherever logits are read, whatever else is sampled beside it.

Filters decide which tokens may be drawn, by logarithms of weights relative to the likeliest token.
Every filter keeps the tokens above a bound, and ties with the last one kept; the others get -inf.
`top_p` sums weights as integers in units of 2^-30 of the likeliest token's: such sums do not
depend on their order, so what is kept is the same to the last bit whatever kernel torch chooses
for the batch.

A token is drawn by adding Gumbel noise to the logarithms of the weights and taking the largest.
The noise is a function of a seed, a position and a token, and there is no generator state: a
request gets the same noise whatever else is in its batch, and again after a preemption. Rounding
of the logits changes a draw only where two sums are nearly equal. A draft model that gets the same
noise draws the target's token as often as their weights agree.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[Any]
# +inf becomes this, so that a temperature of 1e-5 still gives a finite number.
_LARGE = 1e30
_FEW_ROWS = 16
_PIECES = 64
UNIT = 2.0**30
_BIN_BITS = 12
_NUM_BINS = 1 << _BIN_BITS
_LAST_BIN = _NUM_BINS * _NUM_BINS - 1
# Logarithms below -ln(2^30) have weight 0; the rest is cut into 2^24 fine bins.
_FINE_BINS_A_NAT = _LAST_BIN / math.log(UNIT)
_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15  # splitmix64
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def clean_scores(logits: Tensor) -> Tensor:
    """A float32 copy in which NaN counts as -inf."""
    if logits.dtype == torch.float32:
        return torch.nan_to_num(logits, nan=-torch.inf, posinf=_LARGE, neginf=-torch.inf)
    scores = logits.to(torch.float32)
    return scores.nan_to_num_(nan=-torch.inf, posinf=_LARGE, neginf=-torch.inf)


def drop_nan(logits: Tensor) -> Tensor:
    """A copy of the same dtype in which NaN counts as -inf."""
    return torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def row_peaks(logits: Tensor, scores: Tensor, best: Tensor) -> Tensor:
    """Of each row, float32 [rows, 2]: the score of `best` [rows], and the largest logit.

    The first is -inf where no token is left to choose, the second is NaN where a logit is.
    """
    largest = logits.amax(1) if not _in_pieces(logits) else _pieces(logits).amax(2).amax(1)
    return torch.stack([scores.gather(1, best.unsqueeze(1)).squeeze(1).float(), largest.float()], 1)


def first_argmax(scores: Tensor) -> Tensor:
    """The first of the largest scores of each row.

    torch gives a row to one block of threads: on an H200 37 us for a row of 128256, 10 in pieces.
    """
    return _argmax_in_pieces(scores) if _in_pieces(scores) else scores.argmax(1)


def _in_pieces(scores: Tensor) -> bool:
    num_rows, vocab_size = scores.shape
    return scores.is_cuda and num_rows <= _FEW_ROWS and vocab_size % _PIECES == 0


def _pieces(scores: Tensor) -> Tensor:
    return scores.view(len(scores), _PIECES, -1)


def _argmax_in_pieces(scores: Tensor) -> Tensor:
    pieces = _pieces(scores)
    best = torch.max(pieces, 2)
    piece = best.values.argmax(1, keepdim=True)
    return (piece * pieces.shape[2] + best.indices.gather(1, piece)).squeeze(1)


def add_biases(scores: Tensor, places: Tensor, biases: Tensor) -> Tensor:
    """Adds `biases` at `places`, indices into the flattened scores; a bias of -inf bans."""
    scores.view(-1).index_add_(0, places, biases)
    return scores


def mask_tokens(scores: Tensor, rows: Tensor, words: Tensor) -> Tensor:
    """Bans, in these rows, the tokens whose bit of int32 `words` [rows, vocab / 32] is 0."""
    if scores.is_cuda:
        from anabranch.kernels.triton.mask_tokens import mask_tokens as ban
    else:
        from anabranch.kernels.cpu.mask_tokens import mask_tokens as ban
    ban(scores, rows, words)
    return scores


def penalise(
    scores: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Lowers the scores of tokens seen before, in place.

    `counts` [rows, vocab] is how often a token was output, `in_prompt` [rows, vocab] whether it
    was given; the penalties are [rows]. Repetition divides positive scores and multiplies others.
    """
    repetition = repetition.unsqueeze(1)
    output = counts > 0
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    torch.where(output | in_prompt, repeated, scores, out=scores)
    scores.sub_(counts * frequency.unsqueeze(1))
    return scores.sub_(output * presence.unsqueeze(1))


def log_weights(scores: Tensor, best: Tensor, inverse_temperature: Tensor | None) -> Tensor:
    """The scores over the temperature, relative to the score of `best` [rows]; in place."""
    peak = scores.gather(1, best.unsqueeze(1)).clamp_(min=torch.finfo(torch.float32).min)
    scores.sub_(peak)
    return scores if inverse_temperature is None else scores.mul_(inverse_temperature.unsqueeze(1))


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


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


def child_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with n > 1; sample 0 keeps the request's own."""
    if index == 0:
        return seed
    word = (seed + index * _MIX_A) % _WORD
    for shift, factor in ((30, _MIX_A), (27, _MIX_B)):
        word = (word ^ word >> shift) * factor % _WORD
    return (word ^ word >> 31) >> 1


def noise_keys(seeds: Words, positions: Words) -> Words:
    """The 64 bits, as int64, that the noise of each int64 seed and position is made from."""
    mixed = _mix(seeds.view(np.uint64) + np.uint64(_STEP))
    return _mix(mixed + positions.view(np.uint64) * np.uint64(_STEP)).view(np.int64)


def draw(log_weights: Tensor, keys: Tensor) -> Tensor:
    """A token [rows] for float32 logarithms [rows, vocab] and `keys` [rows]; never one of -inf.

    A row of -inf gives token 0.
    """
    if log_weights.is_cuda:
        from anabranch.kernels.triton.gumbel_argmax import gumbel_argmax
    else:
        from anabranch.kernels.cpu.gumbel_argmax import gumbel_argmax
    return gumbel_argmax(log_weights, keys)


def _mix(words: Words) -> Words:
    """Splitmix64's finaliser; the products wrap around."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_MIX_A)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_MIX_B)
    return words ^ words >> np.uint64(31)
