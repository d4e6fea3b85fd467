"""Sampling for a whole batch on the device, with verification of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anabranch.kernels.cpu.linear import find_largest
from anabranch.kernels.cpu.native import native
from anabranch.llm.sampling.batch import (
    Array,
    Positions,
    SampleBatch,
    SampleOutput,
    tree_arrays,
    upload,
)
from anabranch.llm.sampling.logits import (
    add_biases,
    apply_filters,
    clean_scores,
    draw,
    drop_nan,
    first_argmax,
    log_weights,
    mask_tokens,
    noise_keys,
    penalise,
    row_peaks,
    top_k_bounds,
)
from anabranch.llm.sampling.logprobs import Logprobs, token_logprobs
from anabranch.llm.sampling.params import SamplingParams, SamplingRows, Work
from anabranch.llm.sampling.token_counts import TokenCounts
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
            arrays["mask_rows"] = batch.masks.rows
        self.tensors = upload(arrays, device) if arrays else {}
        if batch.masks is not None:
            self.tensors["mask_words"] = batch.masks.words.to(device, non_blocking=True)

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

    @property
    def takes_largest(self) -> bool:
        """Whether every token is that of the largest logit."""
        changed = "biases" in self.tensors or "mask_rows" in self.tensors
        return not (changed or self.work & (Work.DRAW | Work.PENALTIES))

    def process(self, logits: Tensor, counts: TokenCounts | None) -> Tensor:
        """A copy of the logits without NaN and with biases, bans and penalties."""
        if self.takes_largest:
            return drop_nan(logits)
        biased, masked = "biases" in self.tensors, "mask_rows" in self.tensors
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


def _has_kernel(logits: Tensor) -> bool:
    """Whether one for CPUs finds the largest logits."""
    is_plain = logits.dtype == torch.float32 and logits.is_contiguous()
    return logits.device.type == "cpu" and is_plain and native() is not None


class Sampler:
    """Every running request owns a row. No method waits for the device."""

    def __init__(self, rows: SamplingRows, device: torch.device | str) -> None:
        self.vocab_size = rows.vocab_size
        self.device = torch.device(device)
        self._max_num_seqs = max_num_seqs = len(rows.table)
        self._rows = rows
        self._taken = set[int]()
        self._counts: TokenCounts | None = None
        self._zeros = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._ones = torch.ones_like(self._zeros)

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Gives a row to a request, which has outputs already if it was preempted."""
        if not 0 <= row < self._max_num_seqs:
            raise ValueError(f"row {row} is not one of {self._max_num_seqs}")
        if row in self._taken:
            raise ValueError(f"row {row} holds a request")
        self._rows.write(row, params, seed, eos_token_ids)
        if params.penalised:
            if self._counts is None:
                self._counts = TokenCounts(self._max_num_seqs, self.vocab_size, self.device)
            self._counts.reset(row, prompt_token_ids, output_token_ids)
        self._taken.add(row)

    def remove(self, row: int) -> None:
        if row not in self._taken:
            raise ValueError(f"row {row} holds no request")
        self._taken.remove(row)

    def sample(self, logits: Tensor, batch: SampleBatch) -> SampleOutput:
        """The next tokens of every sequence of the batch. The logits are left as they are."""
        self._check(logits, batch)
        step = SampleStep(self._rows, batch, self.device)
        if step.takes_largest and _has_kernel(logits):
            chosen, peaks = find_largest(logits)
        else:
            scores = step.process(logits, self._counts)
            best = first_argmax(scores)
            peaks = row_peaks(logits, scores, best)
            chosen = step.choose(scores, best)
        verified = step.verify(chosen) if batch.max_drafts else None
        peaks = step.emitted(peaks, verified)
        if verified is not None:
            tokens, num_accepted, path = verified
            num_emitted = num_accepted + 1
        else:
            tokens, path = chosen.unsqueeze(1), None
            num_accepted = self._zeros[: len(batch.rows)]
            num_emitted = self._ones[: len(batch.rows)]
        if Work.PENALTIES in step.work:
            assert self._counts is not None
            self._counts.emit(step.tensors["seq_rows"], tokens, num_emitted)
        logprobs = None
        if Work.LOGPROBS in step.work:
            logprobs = step.logprobs(logits, chosen, verified)
        return SampleOutput(tokens, num_emitted, num_accepted, peaks, logprobs, path)

    def _check(self, logits: Tensor, batch: SampleBatch) -> None:
        if logits.shape != (batch.num_logits, self.vocab_size):
            wanted = [batch.num_logits, self.vocab_size]
            raise ValueError(f"logits are {[*logits.shape]}, the batch needs {wanted}")
        if missing := set(batch.rows) - self._taken:
            raise ValueError(f"rows {sorted(missing)} hold no request")
