"""The sequences of one sampling step, and where their logits lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anabranch.compositions.tree import check_tree_order, node_depths
from anabranch.llm.sampling.transfer import Array


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens may be chosen in some rows of logits, a bit for each, the lowest first."""

    rows: Array  # int64 [num_masked]
    words: Array  # int32 [num_masked, ceil(vocab / 32)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Which rows are sampled, and the drafts to verify; everything about them is host data.

    The logits of a sequence are those of its drafts, then one more. With `padded`, every sequence
    has max_drafts + 1 rows of logits, of which those after its own are ignored.
    `num_outputs` is how many tokens each request has emitted so far. Drafts form a chain, or a tree
    by their `parents`: an earlier draft of the sequence, or -1 for one that follows its last token.
    """

    rows: Sequence[int]
    num_outputs: Sequence[int]
    num_drafts: Sequence[int]
    draft_tokens: Tensor | None = None  # [num_seqs, max_drafts]
    padded: bool = False
    parents: Sequence[Sequence[int]] | None = None  # [num_seqs][num_drafts]
    masks: TokenMasks | None = None

    def __post_init__(self) -> None:
        sizes = len(self.rows), len(self.num_outputs), len(self.num_drafts)
        if len(set(sizes)) > 1:
            raise ValueError(f"rows, num_outputs and num_drafts have lengths {sizes}")
        if len(set(self.rows)) < len(self.rows):
            raise ValueError(f"rows {list(self.rows)} are not distinct")
        low, high = min(self.num_drafts, default=0), max(self.num_drafts, default=0)
        if low < 0 or high > self.max_drafts:
            raise ValueError(f"num_drafts {list(self.num_drafts)} exceed {self.max_drafts} drafts")
        if self.draft_tokens is not None and self.draft_tokens.shape[0] != len(self.rows):
            shape = [*self.draft_tokens.shape]
            raise ValueError(f"draft_tokens {shape} do not match {len(self.rows)} sequences")
        if self.parents is not None:
            self._check_parents(self.parents)

    def _check_parents(self, parents: Sequence[Sequence[int]]) -> None:
        sizes = [len(each) for each in parents]
        if sizes != list(self.num_drafts):
            raise ValueError(f"parents of {sizes} drafts do not match {list(self.num_drafts)}")
        for seq, each in enumerate(parents):
            check_tree_order(f"sequence {seq}", each)

    @property
    def max_drafts(self) -> int:
        return 0 if self.draft_tokens is None else self.draft_tokens.shape[1]

    @property
    def num_logits(self) -> int:
        """How many rows of logits the batch has."""
        if self.padded:
            return len(self.rows) * (self.max_drafts + 1)
        return sum(self.num_drafts) + len(self.rows)


@dataclass(frozen=True, slots=True)
class Positions:
    """Host arrays with an entry for each row of logits."""

    seqs: Array  # the sequence
    steps: Array  # which of the sequence's positions: 0 is that of the first drafts
    places: Array  # [num_seqs, max_drafts + 1]: the rows of a sequence, its last one repeated

    @staticmethod
    def of(batch: SampleBatch) -> Positions:
        """The positions of a batch."""
        num_seqs, width = len(batch.rows), batch.max_drafts + 1
        lengths = np.array(batch.num_drafts, np.int64) + 1
        if batch.padded:
            lengths = np.full(num_seqs, width, np.int64)
        starts = np.cumsum(lengths) - lengths
        seqs = np.repeat(np.arange(num_seqs), lengths)
        inside = np.minimum(np.arange(width), lengths[:, None] - 1)
        steps = np.arange(len(seqs)) - starts[seqs]
        if batch.parents is not None:
            steps = tree_arrays(batch.parents, width)["depths"][seqs, steps]
        return Positions(seqs, steps, starts[:, None] + inside)

    def earlier_drafts(self, batch: SampleBatch) -> tuple[Array, Array]:
        """Pairs of a row of logits and a draft before it, as an index into all draft tokens."""
        if batch.parents is not None:
            return self._ancestors(batch, batch.parents)
        known = np.minimum(self.steps, np.array(batch.num_drafts)[self.seqs])
        rows = np.repeat(np.arange(len(known)), known)
        drafts = np.arange(len(rows)) - (np.cumsum(known) - known)[rows]
        return rows, self.seqs[rows] * batch.max_drafts + drafts

    def _ancestors(
        self, batch: SampleBatch, parents: Sequence[Sequence[int]]
    ) -> tuple[Array, Array]:
        rows, drafts = list[int](), list[int]()
        for seq, each in enumerate(parents):
            for node in range(len(each)):
                draft = node
                while draft >= 0:
                    rows.append(int(self.places[seq, node + 1]))
                    drafts.append(seq * batch.max_drafts + draft)
                    draft = each[draft]
        return np.array(rows, np.int64), np.array(drafts, np.int64)


def tree_arrays(parents: Sequence[Sequence[int]], width: int) -> dict[str, Array]:
    """Trees as int64 [num_seqs, width]; node 0 is the last token, its own parent, at depth 0.

    Padding is like node 0.
    """
    above, depths = (np.zeros((len(parents), width), np.int64) for _ in range(2))
    for seq, each in enumerate(parents):
        above[seq, 1 : 1 + len(each)] = np.array(each, np.int64) + 1
        depths[seq, 1 : 1 + len(each)] = node_depths(each)
    return {"above": above, "depths": depths}
