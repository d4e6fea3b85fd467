"""Drafts by a smaller model, whose keys lie in the same pages as the target's.

The draft model has tensors of its own under the target's page tables. It first computes what it
has not seen of each sequence, then drafts by a chain of passes. Nothing is copied to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_chain import MAX_DEPTH, DraftChain, TreeChain
from anabranch.llm.speculative.draft_inputs import CATCH_UP
from anabranch.llm.speculative.proposer import AcceptanceRates, grow_tree, outcomes

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Sequence

FIRST_CHANCE = 0.6  # of the draft model's best token, before anything is measured
OTHERS = 0.4  # of what is left, for each token after it


class DraftProposer:
    """A draft model on the device."""

    on_device = True

    def __init__(self, chain: DraftChain, max_num_tokens: int) -> None:
        self._chain = chain
        self._max_num_tokens = max_num_tokens

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Give every sequence as many drafts as it may have."""
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
        """Nothing to drop: pages belong to the engine."""

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


class DraftTreeProposer(DraftProposer):
    """The likeliest nodes by what was accepted of each rank and depth, in all sequences."""

    def __init__(self, chain: TreeChain, max_num_tokens: int, width: int) -> None:
        super().__init__(chain, max_num_tokens)
        self._width = width
        chances = [FIRST_CHANCE]
        for _ in range(width - 1):
            chances.append(OTHERS * (1 - sum(chances)))
        self.rates = AcceptanceRates([[chance] * MAX_DEPTH for chance in chances])

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Every sequence gets a tree of the same shape."""
        parents = self.shape(num_drafts)
        for seq in seqs:
            seq.drafts, seq.draft_parents = [], list(parents)
            seq.num_drafts = len(parents)

    def shape(self, num_drafts: int) -> list[int]:
        """Parents of the likeliest nodes; siblings come in the order of their ranks."""
        num_expanded: Counter[int] = Counter()

        def expand(depth: int) -> Iterator[tuple[float, int]]:
            if depth == MAX_DEPTH or num_expanded[depth] == self._width:
                return
            num_expanded[depth] += 1
            chance = 1.0
            for rank in range(self._width):
                chance = min(chance, self.rates.chance(rank, depth))
                yield chance, depth + 1

        return grow_tree(0, expand, num_drafts)[1]

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """Count which drafts were right; the draft model has computed all levels but the last."""
        if not run.num_drafts or run.parents is None:
            return
        ranks: list[int] = []
        for draft, parent in enumerate(run.parents):
            ranks.append(run.parents[:draft].count(parent))
        depths = run.depths
        for draft, right in outcomes(run.parents, accepted):
            self.rates.add(ranks[draft], depths[draft] - 1, right)
        known = run.start + run.num_known
        run.seq.num_draft_computed = known + min(len(accepted), max(depths) - 1)
