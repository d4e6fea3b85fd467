"""All drafts of a step by one chain of passes on the device: a token, a pass, the next token.

The first pass computes the last known tokens of every sequence, each later one the draft before
it. Nothing in between is the host's, so that a chain is one CUDA graph, whatever its sequences are
and however they are sampled; without graphs the same passes are launched one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

import torch

from anabranch.llm.runner.graphs import Forward, Graphs, Progress
from anabranch.llm.runner.model_runner import ModelRunner
from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_draws import DraftDraws, Kind
from anabranch.llm.speculative.draft_inputs import DraftInputs


class ChainKey(NamedTuple):
    """The shape of a chain."""

    num_drafts: int
    kind: Kind
    batch: int


class DraftChain:
    """A draft model, its inputs, and how it chooses."""

    def __init__(
        self,
        runner: ModelRunner,
        inputs: DraftInputs,
        draws: DraftDraws,
        unseen: torch.Tensor,  # int64 [max_num_seqs, 1 + max_drafts]
    ) -> None:
        self.runner = runner
        self.graphs: Graphs[ChainKey] = Graphs()
        self._inputs = inputs
        self._draws = draws
        self._unseen = unseen

    @torch.inference_mode()
    def draft(self, runs: Seq[Scheduled]) -> None:
        """Put drafts of these runs into the table of unseen tokens.

        The draft model has computed all but the last CATCH_UP known tokens.
        """
        key = self._fitting(ChainKey(self.num_passes(runs), self._draws.kind(runs), len(runs)))
        self.load(runs, key)
        if key in self.graphs:
            self.graphs.replay(key)
        else:
            self.run(key)

    def num_passes(self, runs: Seq[Scheduled]) -> int:
        """Of the draft model."""
        return max(run.num_drafts for run in runs)

    def load(self, runs: Seq[Scheduled], key: ChainKey) -> None:
        """Copy to the device what the passes read."""
        self._inputs.load(runs, key.batch)
        if key.kind is not Kind.BEST:
            self._draws.load(runs, key.batch)

    def run(self, key: ChainKey) -> torch.Tensor:
        """Drafts [batch, num_drafts] for what the buffers hold, all on the device."""
        drafts: list[torch.Tensor] = []
        for place, each in enumerate(self._inputs.passes(key.batch, key.num_drafts)):
            ids = drafts[-1] if drafts else self._inputs.ids(key.batch)
            logits = self.runner.forward(ids, each.positions, each.step, each.rows)
            drafts.append(self._draws.choose(logits, place, key.kind))
        found = torch.stack(drafts, 1)
        self._unseen[self._inputs.rows(key.batch), 1 : 1 + key.num_drafts] = found
        return found

    @torch.inference_mode()
    def capture(
        self, keys: Seq[ChainKey], progress: Progress | None = None, *, pool: Any = None
    ) -> None:
        """Capture a graph for each shape; `pool` is memory to share with other graphs."""
        self.graphs.pool = self.graphs.pool or pool
        self.graphs.capture_all(keys, self._inert, progress)

    def _inert(self, key: ChainKey) -> Forward:
        self.load([], key)
        return partial(self.run, key)

    def _fitting(self, wanted: ChainKey) -> ChainKey:
        """The smallest graph that holds a chain, or its own shape where there is none."""
        found = self.graphs.fitting(
            lambda key: (
                key.kind is wanted.kind
                and key.num_drafts >= wanted.num_drafts
                and key.batch >= wanted.batch
            )
        )
        return wanted if found is None else found


def chain_keys(numbers: Seq[int], batches: Seq[int]) -> list[ChainKey]:
    """Chains of these numbers of drafts, of all kinds and batch sizes."""
    return [ChainKey(number, kind, size) for number in numbers for kind in Kind for size in batches]
