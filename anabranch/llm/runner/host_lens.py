"""Lengths of the sequences of a step as the host knows them."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple


class HostLens(NamedTuple):
    """New tokens and earlier keys of every sequence."""

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def within(self, tokens: slice) -> HostLens:
        """Those of the sequences whose tokens are some of the step's."""
        ends = accumulate(self.q_lens)
        seqs = [seq for seq, end in enumerate(ends) if tokens.start < end <= tokens.stop]
        return HostLens(*(tuple(lens[seq] for seq in seqs) for lens in self))
