"""One sampling step: what it needs on the device, and the operations on it, in their order."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anabranch.llm.sampling.batch import Positions, SampleBatch, tree_arrays
from anabranch.llm.sampling.filters import apply_filters, top_k_bounds
from anabranch.llm.sampling.logits import (
    add_biases,
    clean_scores,
    drop_nan,
    log_weights,
    mask_tokens,
    penalise,
)
from anabranch.llm.sampling.logprobs import Logprobs, token_logprobs
from anabranch.llm.sampling.noise import draw, noise_keys
from anabranch.llm.sampling.parameter_rows import SamplingRows, Work
from anabranch.llm.sampling.token_counts import TokenCounts
from anabranch.llm.sampling.transfer import Array, upload
from anabranch.llm.sampling.verify import Verified, accept_equal, emit, walk_trees

_FILTERS = {
    Work.GREEDY: "greedy",
    Work.TEMPERATURE: "inverse_temperature",
    Work.MIN_P: "log_min_p",
    Work.TOP_K: "top_k",
    Work.TOP_P: "top_p",
}
_PENALTIES = ("repetition", "frequency", "presence")


class SampleStep:
    """A batch, with everything small about it on the device after one copy."""

    def __init__(self, rows: SamplingRows, batch: SampleBatch, device: torch.device) -> None:
        self.batch = batch
        self._table = rows.table[list(batch.rows)]
        self.work = Work(int(np.bitwise_or.reduce(self._table["work"])))
        arrays = self._layout_arrays()
        if Work.DRAW in self.work:
            arrays |= self._drawing_arrays()
        if Work.PENALTIES in self.work:
            arrays |= self._penalty_arrays()
        if self.work & (Work.BIAS | Work.MIN_TOKENS):
            places, biases = rows.biases(batch, self.positions)
            arrays |= {"bias_places": places, "biases": biases} if places.size else {}
        if batch.masks is not None:
            arrays |= {"mask_rows": batch.masks.rows, "mask_words": batch.masks.words}
        self.tensors = upload(arrays, device) if arrays else {}

    @cached_property
    def positions(self) -> Positions:
        """Where the logits of each sequence lie."""
        return Positions.of(self.batch)

    def _layout_arrays(self) -> dict[str, Array]:
        arrays = dict[str, Array]()
        if self.batch.max_drafts:
            arrays["num_drafts"] = np.array(self.batch.num_drafts, np.int64)
            if self.positions.places.size != self.positions.seqs.size:
                arrays["places"] = self.positions.places
            if self.batch.parents is not None:
                arrays |= tree_arrays(self.batch.parents, self.batch.max_drafts + 1)
        return arrays

    def _drawing_arrays(self) -> dict[str, Array]:
        seqs = self.positions.seqs
        arrays: dict[str, Array] = {
            name: self._table[name][seqs] for flag, name in _FILTERS.items() if flag in self.work
        }
        num_outputs = np.array(self.batch.num_outputs, np.int64)[seqs] + self.positions.steps
        seeds = self._table["seed"][seqs]
        arrays["noise_keys"] = noise_keys(seeds, num_outputs)
        return arrays

    def _penalty_arrays(self) -> dict[str, Array]:
        seqs = self.positions.seqs
        seq_rows = np.array(self.batch.rows, np.int64)
        arrays: dict[str, Array] = {name: self._table[name][seqs] for name in _PENALTIES}
        arrays |= {"seq_rows": seq_rows, "logits_rows": seq_rows[seqs]}
        if self.batch.max_drafts:
            rows, drafts = self.positions.earlier_drafts(self.batch)
            arrays |= {"drafted_rows": rows, "earlier_drafts": drafts}
        return arrays

    def process(self, logits: Tensor, counts: TokenCounts | None) -> Tensor:
        """A copy of the logits without NaN and with biases, bans and penalties."""
        biased, masked = "biases" in self.tensors, "mask_rows" in self.tensors
        if not (biased or masked or self.work & (Work.DRAW | Work.PENALTIES)):
            return drop_nan(logits)
        scores = clean_scores(logits)
        if biased:
            add_biases(scores, self.tensors["bias_places"], self.tensors["biases"])
        if Work.PENALTIES in self.work:
            assert counts is not None
            self._penalise(scores, counts)
        if masked:
            mask_tokens(scores, self.tensors["mask_rows"], self.tensors["mask_words"])
        return scores

    def _penalise(self, scores: Tensor, counts: TokenCounts) -> None:
        rows = self.tensors["logits_rows"]
        outputs = counts.outputs.index_select(0, rows)
        if self.batch.draft_tokens is not None and self.batch.max_drafts:
            drafts = self.batch.draft_tokens.reshape(-1)[self.tensors["earlier_drafts"]]
            counts.count(outputs, self.tensors["drafted_rows"], drafts)
        in_prompt = counts.in_prompt.index_select(0, rows)
        penalise(scores, outputs, in_prompt, **{name: self.tensors[name] for name in _PENALTIES})

    def choose(self, scores: Tensor, best: Tensor) -> Tensor:
        """What the target emits at each position: the best token, or one drawn.

        Overwrites the scores.
        """
        if Work.DRAW not in self.work:
            return best
        drawn = draw(self._filter(scores, best), self.tensors["noise_keys"])
        if Work.GREEDY not in self.work:
            return drawn
        return torch.where(self.tensors["greedy"], best, drawn)

    def _filter(self, scores: Tensor, best: Tensor) -> Tensor:
        """Logarithms of the weights of the tokens that temperature and filters leave."""
        at = self.tensors
        logs = log_weights(scores, best, at.get("inverse_temperature"))
        bounds = [at["log_min_p"]] if Work.MIN_P in self.work else []
        if Work.TOP_K in self.work:
            bounds.append(top_k_bounds(logs, at["top_k"], int(self._table["top_k"].max())))
        bound = torch.maximum(bounds[0], bounds[-1]) if bounds else None
        return apply_filters(logs, bound, at.get("top_p"))

    def verify(self, chosen: Tensor) -> Verified:
        """Emit what the target chose, as far as the drafts agree with it, and one more."""
        drafts = self.batch.draft_tokens
        assert drafts is not None
        chosen, num_drafts = self._by_seq(chosen), self.tensors["num_drafts"]
        if self.batch.parents is not None:
            above, depths = self.tensors["above"], self.tensors["depths"]
            deepest = int(self.positions.steps.max())
            return walk_trees(chosen, drafts, num_drafts, above, depths, deepest)
        num_accepted = accept_equal(chosen, drafts, num_drafts)
        return Verified(emit(chosen, num_accepted), num_accepted)

    def _by_seq(self, rows: Tensor) -> Tensor:
        """[num_logits, ...] as [num_seqs, max_drafts + 1, ...]."""
        if "places" in self.tensors:
            return rows[self.tensors["places"]]
        return rows.view(*self.positions.places.shape, *rows.shape[1:])

    def logprobs(self, logits: Tensor, chosen: Tensor, verified: Verified | None) -> Logprobs:
        """Of the emitted tokens, given those chosen at each row; those of padding mean nothing."""
        num_top = int(self._table["num_top"].max())
        found = token_logprobs(logits, chosen, num_top)
        return Logprobs(*(self.emitted(part, verified) for part in found))

    def emitted(self, rows: Tensor, verified: Verified | None) -> Tensor:
        """Values of each row of logits [num_logits, ...] by sequence and emitted token."""
        if verified is None:
            return rows.unsqueeze(1)
        by_seq = self._by_seq(rows)
        return by_seq if verified.path is None else _along(by_seq, verified.path)


def _along(values: Tensor, path: Tensor) -> Tensor:
    """Values [num_seqs, width, ...] of the nodes of a path [num_seqs, width]."""
    return values[torch.arange(len(path), device=path.device).unsqueeze(1), path]
