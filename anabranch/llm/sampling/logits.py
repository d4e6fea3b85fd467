"""What changes logits before a token is chosen: biases, bans, penalties and temperature."""

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


def first_argmax(scores: Tensor) -> Tensor:
    """The first of the largest scores of each row.

    torch gives a row to one block of threads: on an H200 37 us for a row of 128256, 10 in pieces.
    """
    num_rows, vocab_size = scores.shape
    if not scores.is_cuda or num_rows > _FEW_ROWS or vocab_size % _PIECES:
        return scores.argmax(1)
    return _argmax_in_pieces(scores)


def _argmax_in_pieces(scores: Tensor) -> Tensor:
    pieces = scores.view(len(scores), _PIECES, -1)
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
