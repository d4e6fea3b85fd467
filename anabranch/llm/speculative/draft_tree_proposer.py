"""Trees of drafts by a smaller model, of the shape that has paid so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_model import DraftProposer
from anabranch.llm.speculative.tree_chain import MAX_DEPTH, TreeChain
from anabranch.llm.speculative.tree_growth import AcceptanceRates, grow_tree, outcomes

if TYPE_CHECKING:
    from anabranch.llm.sequences.sequence import Sequence

FIRST_CHANCE = 0.6  # of the draft model's best token, before anything is measured
OTHERS = 0.4  # of what is left, for each token after it


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
