"""Drafts by a smaller model, whose keys lie in the same pages as the target's.

The draft model has tensors of its own under the target's page tables. It first computes what it
has not seen of each sequence, then drafts by a chain of passes. Nothing is copied to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_chain import DraftChain
from anabranch.llm.speculative.draft_inputs import CATCH_UP

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Sequence


class DraftProposer:
    """A draft model on the device."""

    on_device = True

    def __init__(self, chain: DraftChain, max_num_tokens: int) -> None:
        self._chain = chain
        self._max_num_tokens = max_num_tokens

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Every sequence gets as many as it may have."""
        for seq in seqs:
            seq.drafts = []
            seq.num_drafts = num_drafts

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """Draft for the runs that have room for drafts; prompts are only computed.

        Tokens decoded without drafts are computed before the next draft.
        """
        followed = [
            run for run in step if run.seq.speculates and (run.num_drafts or not run.decoding)
        ]
        missing = [part for run in followed for part in _missing_runs(run, self._max_num_tokens)]
        if missing:
            with clock.stage("catch-up"):
                self._catch_up(missing)
        for run in followed:
            run.seq.num_draft_computed = run.start + run.num_known
        drafting = [run for run in followed if run.num_drafts]
        if drafting:
            with clock.stage("proposal"):
                self._chain.draft(drafting)

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """The draft model has computed all drafts but the last."""
        if run.seq.speculates and run.num_drafts:
            known = run.start + run.num_known
            run.seq.num_draft_computed = known + min(len(accepted), run.num_drafts - 1)

    def forget(self, seq: Sequence) -> None:
        """Pages are the engine's."""

    def _catch_up(self, parts: Seq[Scheduled]) -> None:
        batch: list[Scheduled] = []
        num_tokens = 0
        for part in parts:
            if batch and num_tokens + part.num_tokens > self._max_num_tokens:
                self._chain.runner.run(batch)
                batch, num_tokens = [], 0
            batch.append(part)
            num_tokens += part.num_tokens
        self._chain.runner.run(batch)


def _missing_runs(run: Scheduled, most: int) -> Iterator[Scheduled]:
    """What is to be computed before a run can be drafted for, `most` tokens at a time."""
    start = run.seq.num_draft_computed
    stop = run.start + run.num_known - (CATCH_UP if run.num_drafts else 0)
    for begin in range(start, stop, most):
        count = min(most, stop - begin)
        yield Scheduled(run.seq, begin, count, samples=False, by_draft_model=True)
