"""Which keys a query may attend to, as ranges and tiles: the rules of the CPU path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch.nn.functional import pad

BLOCK_M = 256  # query rows that share one explicit mask
MAX_MASKED_PAIRS = 2048  # query-key pairs up to which one masked call beats two and a merge


class Visibility(NamedTuple):
    """The rules for a batch whose keys end in the same column; query i sits in column first + i."""

    q_len: int
    k_len: int
    causal: bool
    window: int | None  # None also where no key lies outside it
    tree: torch.Tensor | None  # bool [num_seqs, q_len, width], replaces the causal rule
    starts: torch.Tensor | None  # int64 [num_seqs], column of the first key; None if all are 0

    @property
    def first(self) -> int:
        """The column of the first query; negative where queries outnumber the keys."""
        return self.k_len - self.q_len

    @property
    def in_order(self) -> bool:
        """Whether keys after the query are hidden."""
        return self.causal and self.tree is None

    @property
    def is_uniform(self) -> bool:
        """Whether every query sees the same keys."""
        return self.tree is None and self.window is None and (not self.causal or self.q_len == 1)

    def row_blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Rows, and the column ranges whose states merge into theirs; other rows see no key."""
        if self.is_uniform or self.q_len * self.k_len <= MAX_MASKED_PAIRS:
            yield slice(0, self.q_len), [slice(0, self.k_len)]
        elif self.window is not None:
            yield from self._windowed_blocks()
        elif self.in_order:
            yield from self._cut(slice(max(-self.first, 0), self.q_len))
        else:
            for rows in _blocks(0, self.q_len):
                yield from self._cut(rows)

    def _windowed_blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        start = 0
        if self.in_order:  # up to column `window` the window hides nothing
            start = min(max(self.window - self.first, 0), self.q_len)
            yield from self._cut(slice(max(-self.first, 0), start))
        for rows in _blocks(start, self.q_len):
            yield rows, [self.columns(rows)]

    def _cut(self, rows: slice) -> Iterator[tuple[slice, list[slice]]]:
        """Cut where the mask begins: every row sees all of the columns before the first query."""
        edge = max(self.first, 0)
        ranges = [slice(0, edge), slice(edge, self.columns(rows).stop)]
        ranges = [columns for columns in ranges if columns.stop > columns.start]
        if rows.stop > rows.start and ranges:
            yield rows, ranges

    def columns(self, rows: slice) -> slice:
        """The range of columns outside of which these rows see nothing."""
        stop = self.k_len
        if self.in_order:
            stop = max(self.first + rows.stop, 0)
        start = 0 if self.window is None else max(self.first + rows.start - self.window + 1, 0)
        return slice(min(start, stop), stop)

    def is_square_causal(self, rows: slice, columns: slice) -> bool:
        """Whether row i sees exactly the first i + 1 of these columns."""
        diagonal = slice(self.first + rows.start, self.first + rows.stop)
        in_square = self.in_order and columns == diagonal
        return in_square and not self._window_hides(rows, columns) and not self._pads(columns)

    def tile(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """True = attend, bool [num_seqs or 1, 1, rows or 1, columns]; None if all is visible."""
        if self.is_uniform and not self._pads(columns):
            return None
        masks = []
        column = torch.arange(columns.start, columns.stop)
        if not self.is_uniform:
            row = torch.arange(self.first + rows.start, self.first + rows.stop)[:, None]
            if self.tree is not None and columns.stop > self.first:
                masks.append(self._tree_tile(rows, columns)[:, None])
            if self.in_order and columns.stop - 1 > self.first + rows.start:
                masks.append((column <= row)[None, None])
            if self._window_hides(rows, columns):
                masks.append((column > row - self.window)[None, None])
        if self._pads(columns):
            masks.append((column >= self.starts[:, None])[:, None, None])
        return reduce(torch.logical_and, masks) if masks else None

    def _window_hides(self, rows: slice, columns: slice) -> bool:
        last = self.first + rows.stop - 1
        return self.window is not None and columns.start <= last - self.window

    def _pads(self, columns: slice) -> bool:
        return self.starts is not None and columns.start < int(self.starts.max())

    def _tree_tile(self, rows: slice, columns: slice) -> torch.Tensor:
        """[num_seqs, rows, columns]: old keys are visible, new ones by the tree, others hidden."""
        start, stop = (max(edge - self.first, 0) for edge in (columns.start, columns.stop))
        shown = self.tree[:, rows, start:stop]
        num_old = columns.stop - columns.start - (stop - start)
        hidden = pad(shown, (0, stop - start - shown.shape[2]), value=False)
        return pad(hidden, (num_old, 0), value=True)


def _blocks(start: int, stop: int) -> Iterator[slice]:
    for block in range(start, stop, BLOCK_M):
        yield slice(block, min(block + BLOCK_M, stop))
