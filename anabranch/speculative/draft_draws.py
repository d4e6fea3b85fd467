"""Which token a draft model proposes: its best, or one drawn with the request's own parameters.

Parameters and random numbers of all drafts of a step lie in persistent buffers, so that drawing is
part of a captured graph. What is drawn from is kept as well: verification divides by it, so it may
be any distribution. That is why `top_k` may be cut to what fits a graph of fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np
import torch

from anabranch.engine.fixed_arrays import FixedArrays
from anabranch.engine.logits import clean_scores, first_argmax, log_weights
from anabranch.engine.sample_random import DRAFT, uniforms
from anabranch.engine.sample_weights import draw, filtered_weights, greedy_or, top_k_bounds
from anabranch.engine.sampling_rows import SamplingRows, Work
from anabranch.engine.scheduler import Scheduled

MAX_TOP_K = 64  # a larger top_k draws drafts from this many tokens
INERT = {"greedy": True, "inverse_temperature": 1.0, "log_min_p": -np.inf, "top_k": 0, "top_p": 1.0}


class Kind(IntEnum):
    """How the drafts of a batch are chosen; each is a graph of its own."""

    BEST = 0  # every sequence is greedy
    DRAWN = 1  # by temperature and min_p
    FILTERED = 2  # by top_k and top_p as well


class DraftDraws:
    """Chooses drafts, and keeps the probabilities they were drawn with."""

    def __init__(self, rows: SamplingRows, max_drafts: int, device: torch.device) -> None:
        max_num_seqs = len(rows.table)
        shape = max_num_seqs, max_drafts
        self.probs = torch.zeros(*shape, rows.vocab_size, device=device)
        self._rows = rows
        self._max_top_k = min(MAX_TOP_K, rows.vocab_size)
        dtypes = (torch.bool, torch.float32, torch.float32, torch.int64, torch.float64)
        fields = {name: (dtype, (max_num_seqs,)) for name, dtype in zip(INERT, dtypes, strict=True)}
        self._arrays = FixedArrays(fields | {"draws": (torch.float64, shape[::-1])}, device)

    def kind(self, runs: Seq[Scheduled]) -> Kind:
        """What these runs need, known without a look at the device."""
        if all(run.seq.params.greedy for run in runs):
            return Kind.BEST
        work = int(np.bitwise_or.reduce(self._rows.table["work"][_rows(runs)]))
        return Kind.FILTERED if work & (Work.TOP_K | Work.TOP_P) else Kind.DRAWN

    def load(self, runs: Seq[Scheduled], batch: int) -> None:
        """Copy parameters and random numbers to the device; greedy ones for inert sequences."""
        arrays, table = self._arrays.write(), self._rows.table[_rows(runs)]
        for name, inert in INERT.items():
            arrays[name][: len(runs)] = table[name]
            arrays[name][len(runs) : batch] = inert
        np.minimum(arrays["top_k"], self._max_top_k, out=arrays["top_k"])
        first = np.array([run.seq.num_output for run in runs], np.int64)
        places = first + np.arange(len(arrays["draws"]))[:, None]
        arrays["draws"][:, : len(runs)] = uniforms(table["seed"], places, DRAFT)
        self._arrays.send(len(arrays["draws"]))

    def choose(self, logits: torch.Tensor, place: int, kind: Kind) -> torch.Tensor:
        """The draft at this place for every row of logits; all on the device."""
        if kind is Kind.BEST:
            return first_argmax(logits)
        weights = self._weigh(clean_scores(logits), kind)
        total = weights.sum(1, keepdim=True, dtype=torch.int64).clamp_(min=1)
        torch.div(weights, total, out=self.probs[: len(logits), place])
        return draw(weights, self._arrays.tensors["draws"][place, : len(logits)])

    def _weigh(self, scores: torch.Tensor, kind: Kind) -> torch.Tensor:
        at = {name: self._arrays.tensors[name][: len(scores)] for name in INERT}
        best = first_argmax(scores)
        logs = log_weights(scores, best, at["inverse_temperature"])
        bounds = at["log_min_p"]
        if kind is Kind.FILTERED:
            bounds = torch.maximum(bounds, top_k_bounds(logs, at["top_k"], self._max_top_k))
        weights = filtered_weights(logs, bounds, at["top_p"] if kind is Kind.FILTERED else None)
        return greedy_or(weights, best, at["greedy"])


def _rows(runs: Seq[Scheduled]) -> list[int]:
    return [run.seq.row or 0 for run in runs]
