"""Drafts by looking up: what followed the last time these tokens were seen, a chain or a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from anabranch.llm.speculative.proposer import AcceptanceRates, grow_tree, outcomes

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Scheduled, Sequence

LONGEST = 8  # tokens in a row that agree, beyond which more say nothing
# Of rank 0 by agreement, as measured for SmolLM2 on the demo's text; of the others, a share of what
# the ranks before leave.
FIRST_CHANCES = (0.0, 0.2, 0.25, 0.4, 0.45, 0.7, 0.75, 0.85, 0.87)
OTHERS = 0.2
Known = TypeVar("Known")


def new_ngrams(
    tokens: Seq[int], num_indexed: int, sizes: Seq[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every n-gram that ends from there to before the last token, and the place after it."""
    for end in range(num_indexed, len(tokens) - 1):
        for size in sizes:
            if size <= end + 1:
                yield tuple(tokens[end + 1 - size : end + 1]), end + 1


class NgramIndex:
    """Where each n-gram of a growing sequence was last followed by something."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Seq[int]) -> None:
        """Index what was added: every n-gram that ends before the last token."""
        self._next.update(new_ngrams(tokens, self._indexed, self._sizes))
        self._indexed = max(len(tokens) - 1, self._indexed)

    def propose(self, tokens: Seq[int], num_drafts: int) -> list[int]:
        """What followed the longest known n-gram at the end of `tokens`."""
        self.extend(tokens)
        for size in self._sizes:
            if size > len(tokens):
                continue
            place = self._next.get(tuple(tokens[-size:]))
            if place is not None:
                return _continue(tokens, place, num_drafts)
        return []


def _continue(tokens: Seq[int], place: int, num_drafts: int) -> list[int]:
    """The tokens from `place` on; wraps around, to continue a repetition."""
    period = len(tokens) - place
    return [tokens[place + step % period] for step in range(num_drafts)]


class LookupProposer(Generic[Known]):
    """Keeps on the host what it knows of each sequence."""

    on_device = False

    def __init__(self, make: Callable[[], Known]) -> None:
        self._make, self._known = make, dict["Sequence", Known]()

    def known_of(self, seq: Sequence) -> Known:
        if seq not in self._known:
            self._known[seq] = self._make()
        return self._known[seq]

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """Nothing to do on the device."""

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """Indexes follow the tokens of their sequence by themselves."""

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)


class NgramProposer(LookupProposer[NgramIndex]):
    """Prompt lookup."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        super().__init__(lambda: NgramIndex(min_ngram, max_ngram))

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        for seq in seqs:
            seq.drafts = self.known_of(seq).propose(seq.tokens, num_drafts)
            seq.num_drafts = len(seq.drafts)


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
    """State of one sequence: its n-grams, acceptance rates, and the latest drafts."""

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


class NgramTreeProposer(LookupProposer[Lookup]):
    """Prompt lookup of the different tokens that have followed what a sequence ends in.

    A node continues the passage its parent was found in. Its siblings are what else has followed
    the same last tokens, those of longer n-grams and of later places first.
    """

    def __init__(self, min_ngram: int, max_ngram: int, width: int) -> None:
        super().__init__(lambda: Lookup(min_ngram, max_ngram, width))

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        for seq in seqs:
            seq.drafts, seq.draft_parents = self.known_of(seq).grow(seq.tokens, num_drafts)
            seq.num_drafts = len(seq.drafts)

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        if run.parents is not None and run.seq in self._known:
            self._known[run.seq].learn(run.parents, accepted)


def first_chances(width: int) -> list[list[float]]:
    """Assumed before anything is measured, [width][LONGEST + 1]."""
    ranks = [list(FIRST_CHANCES)]
    for _ in range(width - 1):
        left = [1 - sum(row[kind] for row in ranks) for kind in range(LONGEST + 1)]
        ranks.append([OTHERS * chance for chance in left])
    return ranks
