"""What changes logits before a token is chosen: biases, bans, penalties and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

# +inf becomes this, so that a temperature of 1e-5 still gives a finite number.
_LARGE = 1e30


def clean_scores(logits: Tensor) -> Tensor:
    """A float32 copy in which NaN counts as -inf."""
    if logits.dtype == torch.float32:
        return torch.nan_to_num(logits, nan=-torch.inf, posinf=_LARGE, neginf=-torch.inf)
    scores = logits.to(torch.float32)
    return scores.nan_to_num_(nan=-torch.inf, posinf=_LARGE, neginf=-torch.inf)


def add_biases(scores: Tensor, places: Tensor, biases: Tensor) -> Tensor:
    """Adds `biases` at `places`, indices into the flattened scores; a bias of -inf bans."""
    scores.view(-1).index_add_(0, places, biases)
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
