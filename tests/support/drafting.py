"""Drafts as the sampler that verifies them would choose them, one position at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.llm.sampling.batch import SampleBatch
from anabranch.llm.sampling.logits import clean_scores, first_argmax
from anabranch.llm.sampling.sampler import Sampler, SampleStep


def propose(sampler: Sampler, logits: Tensor, batch: SampleBatch) -> Tensor:
    """Tokens [num_seqs], drawn with the noise of their positions."""
    step = SampleStep(sampler._rows, batch, sampler.device)
    scores = clean_scores(logits)
    return step.choose(scores, first_argmax(scores))


def filtered_probs(sampler: Sampler, logits: Tensor, batch: SampleBatch) -> Tensor:
    """What tokens are drawn from, [num_seqs, vocab]."""
    step = SampleStep(sampler._rows, batch, sampler.device)
    scores = clean_scores(logits)
    return torch.softmax(step._filter(scores, first_argmax(scores)).double(), 1)
