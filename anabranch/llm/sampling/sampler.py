"""Sampling for a whole batch on the device, with verification of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from anabranch.llm.sampling.batch import SampleBatch
from anabranch.llm.sampling.logits import first_argmax, row_peaks
from anabranch.llm.sampling.parameter_rows import SamplingRows, Work
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.sample_step import SampleStep
from anabranch.llm.sampling.samples import SampleOutput
from anabranch.llm.sampling.token_counts import TokenCounts


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
