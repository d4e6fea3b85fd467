"""Drafts by looking up: what followed the last time these tokens were seen."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Scheduled, Sequence


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


class NgramProposer:
    """Prompt lookup: an index for each sequence, on the host."""

    on_device = False

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = (min_ngram, max_ngram)
        self._indexes: dict[Sequence, NgramIndex] = {}

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Look up every sequence that may take drafts."""
        for seq in seqs:
            index = self._indexes.get(seq)
            if index is None:
                index = self._indexes[seq] = NgramIndex(*self._sizes)
            seq.drafts = index.propose(seq.tokens, num_drafts)
            seq.num_drafts = len(seq.drafts)

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """Nothing to do on the device."""

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """The index follows the sequence's tokens by itself."""

    def forget(self, seq: Sequence) -> None:
        """Drop the index of a sequence."""
        self._indexes.pop(seq, None)
