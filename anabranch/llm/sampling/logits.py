"""What changes logits before a token is chosen: biases, bans, penalties and temperature.

A logit that is NaN counts as -inf wherever logits are read, whatever else is sampled beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# +inf becomes this, so that a temperature of 1e-5 still gives a finite number.
_LARGE = 1e30
_FEW_ROWS = 16
_PIECES = 64


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
