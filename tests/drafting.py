"""Drafts drawn as the sampler that verifies them would draw, one position at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anabranch.engine.logits import clean_scores, first_argmax
from anabranch.engine.sample_batch import SampleBatch
from anabranch.engine.sample_random import DRAFT, uniforms
from anabranch.engine.sample_step import SampleStep
from anabranch.engine.sample_weights import draw
from anabranch.engine.sampler import Sampler


def propose(sampler: Sampler, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """Tokens [num_seqs] and the probabilities [num_seqs, vocab] they are drawn from."""
    step = SampleStep(sampler._rows, batch, sampler.device)
    scores = clean_scores(logits)
    weights = step.target_weights(scores, first_argmax(scores))
    seeds = sampler._rows.table["seed"][list(batch.rows)]
    draws = uniforms(seeds, np.array(batch.num_outputs, np.int64), DRAFT)
    total = weights.sum(1, keepdim=True, dtype=torch.int64).clamp_(min=1)
    return draw(weights, torch.from_numpy(draws).to(weights.device)), weights / total
