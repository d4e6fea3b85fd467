"""Which token a draft model proposes: its best, or one drawn with the request's own parameters.

Parameters and noise keys of all drafts of a step lie in persistent buffers, so that drawing is
part of a captured graph. A draft is drawn with the noise that the target's token at its position
is drawn with: where the models agree, so do the tokens. Drafts decide how many tokens a step
emits, never which, so `top_k` may be cut to what fits a graph of fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np
import torch

from anabranch.llm.runner.step_inputs import FixedArrays
from anabranch.llm.sampling.logits import (
    apply_filters,
    clean_scores,
    draw,
    first_argmax,
    log_weights,
    noise_keys,
    top_k_bounds,
)
from anabranch.llm.sampling.params import SamplingRows, Work
from anabranch.llm.sequences.sequence import Scheduled

MAX_TOP_K = 64  # a larger top_k draws drafts from this many tokens
INERT = {"greedy": True, "inverse_temperature": 1.0, "log_min_p": -np.inf, "top_k": 0, "top_p": 1.0}


class Kind(IntEnum):
    """How the drafts of a batch are chosen; each is a graph of its own."""

    BEST = 0  # every sequence is greedy
    DRAWN = 1  # by temperature and min_p
    FILTERED = 2  # by top_k and top_p as well


class DraftDraws:
    """Chooses drafts on the device."""

    def __init__(self, rows: SamplingRows, max_drafts: int, device: torch.device) -> None:
        max_num_seqs = len(rows.table)
        self._rows = rows
        self._max_top_k = min(MAX_TOP_K, rows.vocab_size)
        dtypes = (torch.bool, torch.float32, torch.float32, torch.int64, torch.float64)
        fields = {name: (dtype, (max_num_seqs,)) for name, dtype in zip(INERT, dtypes, strict=True)}
        keys = {"noise_keys": (torch.int64, (max_drafts, max_num_seqs))}
        self._arrays = FixedArrays(fields | keys, device)

    def kind(self, runs: Seq[Scheduled]) -> Kind:
        """What these runs need, known without a look at the device."""
        if all(run.seq.params.greedy for run in runs):
            return Kind.BEST
        work = int(np.bitwise_or.reduce(self._rows.table["work"][_rows(runs)]))
        return Kind.FILTERED if work & (Work.TOP_K | Work.TOP_P) else Kind.DRAWN

    def load(self, runs: Seq[Scheduled], batch: int) -> None:
        """Copy parameters and noise keys to the device; inert sequences are greedy."""
        arrays, table = self._arrays.write(), self._rows.table[_rows(runs)]
        for name, inert in INERT.items():
            arrays[name][: len(runs)] = table[name]
            arrays[name][len(runs) : batch] = inert
        np.minimum(arrays["top_k"], self._max_top_k, out=arrays["top_k"])
        keys = arrays["noise_keys"]
        first = np.array([run.seq.num_output for run in runs], np.int64)
        keys[:, : len(runs)] = noise_keys(table["seed"], first + np.arange(len(keys))[:, None])
        self._arrays.send(len(keys))

    def choose(self, logits: torch.Tensor, place: int, kind: Kind) -> torch.Tensor:
        """The draft at this place for every row of logits; all on the device."""
        if kind is Kind.BEST:
            return first_argmax(logits)
        scores, at = clean_scores(logits), self._arrays.tensors
        best = first_argmax(scores)
        drawn = draw(self._filter(scores, best, kind), at["noise_keys"][place, : len(logits)])
        return torch.where(at["greedy"][: len(logits)], best, drawn)

    def rank(
        self, logits: torch.Tensor, place: int, kind: Kind, width: int, batch: int
    ) -> torch.Tensor:
        """The first choices at this place [rows, width]; the rows are of `batch` sequences in turn.

        Drawn ones are the first that the request's noise would draw without those before.
        """
        best = logits.topk(width).indices
        if kind is Kind.BEST:
            return best
        scores, repeats = clean_scores(logits), len(logits) // batch
        logs = self._filter(scores, best[:, 0], kind, repeats)
        at = self._arrays.tensors
        keys = _repeat(at["noise_keys"][place, :batch], repeats)
        drawn: list[torch.Tensor] = []
        for _ in range(width):
            drawn.append(draw(logs, keys))
            logs.scatter_(1, drawn[-1][:, None], -torch.inf)
        is_greedy = _repeat(at["greedy"][:batch], repeats)[:, None]
        return torch.where(is_greedy, best, torch.stack(drawn, 1))

    def _filter(
        self, scores: torch.Tensor, best: torch.Tensor, kind: Kind, repeats: int = 1
    ) -> torch.Tensor:
        at = {name: self._arrays.tensors[name][: len(scores) // repeats] for name in INERT}
        if repeats > 1:
            at = {name: _repeat(values, repeats) for name, values in at.items()}
        logs = log_weights(scores, best, at["inverse_temperature"])
        bounds = at["log_min_p"]
        if kind is not Kind.FILTERED:
            return apply_filters(logs, bounds, None)
        bounds = torch.maximum(bounds, top_k_bounds(logs, at["top_k"], self._max_top_k))
        return apply_filters(logs, bounds, at["top_p"])


def _repeat(values: torch.Tensor, repeats: int) -> torch.Tensor:
    """Repeat each value, keeping their order."""
    return values[:, None].expand(-1, repeats).flatten()


def _rows(runs: Seq[Scheduled]) -> list[int]:
    return [run.seq.row or 0 for run in runs]
