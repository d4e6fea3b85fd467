"""Natural logarithms of the model's own probabilities, before anything changes the logits."""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.llm.sampling.logits import clean_scores

_ROWS_AT_ONCE = 128  # of the prompt, each a row of float32 logits


class Logprobs(NamedTuple):
    """Of chosen tokens and of the likeliest ones. The leading dimensions are the tokens' own."""

    chosen: Tensor  # [...], float32
    ranks: Tensor  # [...], 1 for the likeliest
    top_ids: Tensor  # [..., num_top]
    top: Tensor  # [..., num_top], float32, from the largest


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """Logprobs of `tokens` [rows] and of the `num_top` likeliest under `logits` [rows, vocab]."""
    logits = clean_scores(logits)
    norm = logits.logsumexp(1).clamp_(min=torch.finfo(torch.float32).min)
    chosen = logits.gather(1, tokens.long().unsqueeze(1))
    ranks = (logits > chosen).sum(1) + 1
    top, top_ids = logits.topk(num_top)
    return Logprobs(chosen.squeeze(1) - norm, ranks, top_ids, top - norm.unsqueeze(1))


def prompt_logprobs(logits: Tensor, targets: Tensor, num_top: int) -> Logprobs:
    """Logprobs of prompt tokens: `targets` [rows] are the tokens that follow those of `logits`."""
    if targets.shape != logits.shape[:1]:
        raise ValueError(f"targets {[*targets.shape]} do not match logits {[*logits.shape]}")
    if not 0 <= num_top <= logits.shape[1]:
        raise ValueError(f"num_top {num_top} is not from 0 to the vocabulary {logits.shape[1]}")
    rows, tokens = torch.split(logits, _ROWS_AT_ONCE), torch.split(targets, _ROWS_AT_ONCE)
    parts = map(token_logprobs, rows, tokens, repeat(num_top))
    return Logprobs(*(torch.cat(part) for part in zip(*parts, strict=True)))
