"""Which sequences of a step share leading pages, as the host sees it.

The host only chooses: whether a step looks for shared prefixes, in how many levels, and in which
order sequences stand. What is shared is found on the device, from the page table, so a wrong guess
costs time and never changes a result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from itertools import pairwise

from anabranch.compositions.cascade import MIN_SAVED_BYTES, MIN_SAVED_KEYS
from anabranch.llm.runner.step_layout import SHORT
from anabranch.llm.sequences.sequence import Scheduled, Sequence

LEVELS = (1, 3)  # that have graphs: one prompt of many samples; prompt, document, conversation


class SharedPrefixes:
    """The choice for each step, made again when its sequences change.

    page_size      keys of a page
    token_bytes    that a layer keeps of a token
    always         share whatever is shared, whether or not that saves time
    """

    def __init__(self, *, page_size: int, token_bytes: int, always: bool = False) -> None:
        self.enabled = True  # off: every sequence is attended to apart
        self.min_saved_keys = 1 if always else MIN_SAVED_KEYS
        self.min_saved_bytes = 0 if always else MIN_SAVED_BYTES
        self._min_saved_pages = 1 if always else MIN_SAVED_BYTES / (token_bytes * page_size)
        # sequences, with the pages they were last admitted with: leading pages change no more
        self._members: dict[Sequence, int] = {}
        self._places: dict[Sequence, int] = {}
        self._levels = 0

    def order(self, step: list[Scheduled]) -> list[Scheduled]:
        """The step, with sequences of few queries that share pages side by side."""
        self._observe(step)
        if not self._levels:
            return step
        last = len(step)
        return sorted(step, key=lambda run: self._places.get(run.seq, last))

    def levels(self, step: Seq[Scheduled]) -> int:
        """How many levels of shared prefixes are worth looking for; 0 for none."""
        self._observe(step)
        return self._levels if self.enabled else 0

    def _observe(self, step: Seq[Scheduled]) -> None:
        short = [run.seq for run in step if run.num_tokens <= SHORT]
        members = {seq: seq.num_preemptions for seq in short if seq.pages.pages}
        if members == self._members:
            return
        self._members, self._levels = members, 0
        if len({seq.pages.pages[0] for seq in members}) == len(members):
            return
        sharers = sorted(members, key=lambda seq: seq.pages.pages)  # as in the prefix tree
        self._places = {seq: place for place, seq in enumerate(sharers)}
        self._levels = self._worthwhile([seq.pages.pages for seq in sharers])

    def _worthwhile(self, pages: Seq[Seq[int]]) -> int:
        common = [0, *(_num_common(*pair) for pair in pairwise(pages))]
        best, saved = 0, 0
        for levels in LEVELS:
            more = saved_pages(common, levels)
            if more - saved >= self._min_saved_pages:
                best, saved = levels, more
        return best


def saved_pages(common: Seq[int], levels: int, depth: int = 0) -> int:
    """How many reads of a page are saved if neighbours read what they share once.

    common  leading pages that each sequence has in common with the one before it
    depth   pages that the levels above share already
    """
    edges = [i for i, shared in enumerate(common) if not i or shared <= depth]
    saved = 0
    for start, stop in zip(edges, [*edges[1:], len(common)], strict=True):
        if stop - start > 1 and levels:
            end = min(common[start + 1 : stop])
            saved += (end - depth) * (stop - start - 1)
            saved += saved_pages(common[start:stop], levels - 1, end)
    return saved


def _num_common(mine: Seq[int], other: Seq[int]) -> int:
    """Leading pages in common, if none is in common after the first that is not."""
    size = min(len(mine), len(other))
    return bisect_left(range(size), True, key=lambda i: mine[i] != other[i])
