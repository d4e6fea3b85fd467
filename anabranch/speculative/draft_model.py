"""Drafts by a smaller model, whose keys lie in the same pages as the target's.

The draft model has tensors of its own under the target's page tables. It first computes what it
has not seen of each sequence, then drafts a token at a time. Nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from anabranch.engine.logits import first_argmax
from anabranch.engine.sample_batch import SampleBatch
from anabranch.engine.scheduler import Scheduled

if TYPE_CHECKING:
    from anabranch.engine.runner import Runner
    from anabranch.engine.sampler import Sampler
    from anabranch.engine.sequence import Sequence

CATCH_UP = 2  # tokens the draft model has not computed after all drafts were accepted


class DraftProposer:
    """A draft model on the device."""

    on_device = True

    def __init__(
        self, runner: Runner, sampler: Sampler, unseen: torch.Tensor, max_num_tokens: int
    ) -> None:
        self._runner = runner
        self._max_num_tokens = max_num_tokens
        self._sampler = sampler
        self._unseen = unseen  # [max_num_seqs, 1 + max_drafts]

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Every sequence gets as many as it may have."""
        for seq in seqs:
            seq.drafts = []
            seq.num_drafts = num_drafts

    def propose(self, step: Seq[Scheduled]) -> torch.Tensor | None:
        """Draft for the runs that have room for drafts; the others are only computed."""
        followed = [run for run in step if run.seq.speculates]
        drafting = [run for run in followed if run.num_drafts]
        if not drafting and all(run.decoding for run in followed):
            return None  # a token now and then is caught up with later
        logits = self._catch_up(followed)
        for run in followed:
            run.seq.num_draft_computed = run.start + run.num_known
        if not drafting:
            return None
        most = max(run.num_drafts for run in drafting)
        probs = None
        if any(run.seq.params.temperature > 0 for run in drafting):
            probs = logits.new_zeros(len(drafting), most, logits.shape[1], dtype=torch.float32)
        for position in range(most):
            active = [i for i, run in enumerate(drafting) if run.num_drafts > position]
            runs = [drafting[i] for i in active]
            rows = self._to_device([run.seq.row or 0 for run in runs])
            if probs is None:
                tokens = first_argmax(logits)
            else:
                tokens, drawn = self._sampler.propose(logits, _positions(runs, position))
                probs[self._to_device(active), position] = drawn.float()
            self._unseen[rows, 1 + position] = tokens
            runs = [run for run in runs if run.num_drafts > position + 1]
            if runs:
                logits = self._runner.run([_after(run, position) for run in runs]).rows
        return probs

    def finish(self, run: Scheduled, num_accepted: int) -> None:
        """The draft model has computed all drafts but the last."""
        if run.seq.speculates and run.num_drafts:
            known = run.start + run.num_known
            run.seq.num_draft_computed = known + min(num_accepted, run.num_drafts - 1)

    def forget(self, seq: Sequence) -> None:
        """Pages are the engine's."""

    def _catch_up(self, step: Seq[Scheduled]) -> torch.Tensor:
        """Compute what the draft model has not seen; logits of the runs that get drafts."""
        logits: list[torch.Tensor] = []
        batch: list[Scheduled] = []
        num_tokens = 0
        for run in (part for each in step for part in _behind(each, self._max_num_tokens)):
            if batch and num_tokens + run.num_tokens > self._max_num_tokens:
                logits.append(self._run(batch))
                batch, num_tokens = [], 0
            batch.append(run)
            num_tokens += run.num_tokens
        logits.append(self._run(batch))
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _run(self, step: list[Scheduled]) -> torch.Tensor:
        rows, every = self._runner.run(step)
        return rows if every is None else rows[every - 1 :: every]

    def _to_device(self, values: list[int]) -> torch.Tensor:
        tensor = torch.tensor(values, pin_memory=self._unseen.is_cuda)
        return tensor.to(self._unseen.device, non_blocking=True)


def _behind(run: Scheduled, most: int) -> Iterator[Scheduled]:
    """What the draft model has yet to compute of a run's known tokens, `most` at a time."""
    stop = run.start + run.num_known
    start = run.seq.num_draft_computed
    if run.num_drafts:  # one number of tokens for all, so that a graph fits
        start = max(min(start, stop - CATCH_UP), 0)
    while stop - start > most:
        yield Scheduled(run.seq, start, most, samples=False, by_draft_model=True)
        start += most
    samples = run.num_drafts > 0
    yield Scheduled(run.seq, start, stop - start, samples=samples, by_draft_model=True)


def _after(run: Scheduled, position: int) -> Scheduled:
    """One token: the draft at this position."""
    start = run.start + run.num_known + position
    return Scheduled(run.seq, start, 1, 1, first_draft=position, by_draft_model=True)


def _positions(runs: list[Scheduled], position: int) -> SampleBatch:
    """Which token each sequence draws next."""
    return SampleBatch(
        rows=[run.seq.row or 0 for run in runs],
        num_outputs=[run.seq.num_output + position for run in runs],
        num_drafts=[0] * len(runs),
    )
