"""Tests for processes side by side, each of which claims a few neighbours at a time.

Neighbours mostly need the same kernels, so few are compiled by two processes at once; and who has
finished its own stretch goes on in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

import pytest

GROUP = 4  # tests that are claimed at once


class Claims(NamedTuple):
    """A folder with a file for each claim, and which of how many processes this is."""

    folder: Path
    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> Self:
        """Read FOLDER:INDEX/COUNT."""
        folder, _, share = text.rpartition(":")
        index, count = map(int, share.split("/"))
        return cls(Path(folder), index, count)

    def claim(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        """The items that no other process took, from this one's stretch on."""
        groups = [items[start : start + GROUP] for start in range(0, len(items), GROUP)]
        first = self.index * len(groups) // self.count
        for group in groups[first:] + groups[:first]:
            name = sha256("\n".join(item.nodeid for item in group).encode()).hexdigest()
            try:
                (self.folder / name).touch(exist_ok=False)
            except FileExistsError:
                continue
            yield from group


def run_claimed(session: pytest.Session, claims: Claims) -> None:
    """In the place of pytest's loop."""
    claimed = claims.claim(session.items)
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
