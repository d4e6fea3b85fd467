"""Trees of drafts by looking up: the different tokens that have followed what a sequence ends in.

A node continues the passage its parent was found in. Its siblings are what else has followed the
same last tokens, those of longer n-grams and of later places first.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from anabranch.llm.speculative.ngram import new_ngrams
from anabranch.llm.speculative.tree_growth import AcceptanceRates, grow_tree, outcomes

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Scheduled, Sequence

LONGEST = 8  # tokens in a row that agree, beyond which more say nothing
# Of rank 0 by agreement, as measured for SmolLM2 on the demo's text; of the others, a share of what
# the ranks before leave.
FIRST_CHANCES = (0.0, 0.2, 0.25, 0.4, 0.45, 0.7, 0.75, 0.85, 0.87)
OTHERS = 0.2


class Draft(NamedTuple):
    """A token of a tree."""

    token: int
    before: tuple[int, ...]  # the last tokens, with this one
    place: int  # where the passage goes on that it was found in
    agreement: int  # tokens in a row that agree with that passage
    rank: int  # among its siblings


class NgramPlaces:
    """The latest places after each n-gram of a growing sequence, one for each token there."""

    def __init__(self, min_ngram: int, max_ngram: int, width: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._width = width
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def extend(self, tokens: Seq[int]) -> None:
        """Index what was added: every n-gram that ends before the last token."""
        for ngram, place in new_ngrams(tokens, self._indexed, self.sizes):
            known = self._places.get(ngram)
            if known is None:
                self._places[ngram] = [place]
                continue
            others = [other for other in known if tokens[other] != tokens[place]]
            self._places[ngram] = [place, *others[: self._width - 1]]
        self._indexed = max(len(tokens) - 1, self._indexed)

    def find(self, before: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Places after the n-grams that `before` ends in, and the size of each; longest first."""
        for size in self.sizes:
            if size <= len(before):
                for place in self._places.get(before[-size:], ()):
                    yield place, size


class Lookup:
    """What is known of one sequence: its n-grams, which drafts were right, and those made last."""

    def __init__(self, min_ngram: int, max_ngram: int, width: int) -> None:
        self._max_ngram = max_ngram
        self._width = width
        self._places = NgramPlaces(min_ngram, max_ngram, width)
        self._rates = AcceptanceRates(first_chances(width))
        self._drafts: list[Draft] = []

    def grow(self, tokens: Seq[int], num_drafts: int) -> tuple[list[int], list[int]]:
        """Drafts after `tokens` and their parents."""
        self._places.extend(tokens)

        def expand(node: Draft) -> Iterator[tuple[float, Draft]]:
            for draft in self._continuations(node, tokens):
                yield self._rates.chance(draft.rank, draft.agreement), draft

        root = Draft(tokens[-1], tuple(tokens[-self._max_ngram :]), len(tokens), 0, 0)
        self._drafts, parents = grow_tree(root, expand, num_drafts)
        return [draft.token for draft in self._drafts], parents

    def _continuations(self, node: Draft, tokens: Seq[int]) -> Iterator[Draft]:
        """What may follow a node, the likeliest first."""
        found: set[int] = set()
        passages = [(node.place, node.agreement)] if node.place < len(tokens) else []
        for place, agreement in (*passages, *self._places.find(node.before)):
            token = tokens[place]
            if token in found:
                continue
            before = (*node.before, token)[-self._max_ngram :]
            yield Draft(token, before, place + 1, min(agreement + 1, LONGEST), len(found))
            found.add(token)
            if len(found) == self._width:
                return

    def learn(self, parents: Seq[int], accepted: Seq[int]) -> None:
        """Count which of the last drafts were right."""
        for place, right in outcomes(parents, accepted):
            self._rates.add(self._drafts[place].rank, self._drafts[place].agreement, right)


class NgramTreeProposer:
    """Prompt lookup of several continuations, on the host."""

    on_device = False

    def __init__(self, min_ngram: int, max_ngram: int, width: int) -> None:
        self._options = (min_ngram, max_ngram, width)
        self._lookups: dict[Sequence, Lookup] = {}

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Look up every sequence that may take drafts."""
        for seq in seqs:
            lookup = self._lookups.get(seq)
            if lookup is None:
                lookup = self._lookups[seq] = Lookup(*self._options)
            seq.drafts, seq.draft_parents = lookup.grow(seq.tokens, num_drafts)
            seq.num_drafts = len(seq.drafts)

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """Nothing to do on the device."""

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """Count which drafts were right."""
        if run.parents is not None and run.seq in self._lookups:
            self._lookups[run.seq].learn(run.parents, accepted)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a sequence."""
        self._lookups.pop(seq, None)


def first_chances(width: int) -> list[list[float]]:
    """Assumed before anything is measured, [width][LONGEST + 1]."""
    ranks = [list(FIRST_CHANCES)]
    for _ in range(width - 1):
        left = [1 - sum(row[kind] for row in ranks) for kind in range(LONGEST + 1)]
        ranks.append([OTHERS * chance for chance in left])
    return ranks
