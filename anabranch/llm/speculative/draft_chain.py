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

from anabranch.compositions.tree import node_depths
from anabranch.llm.runner.graphs import Forward, Graphs, Progress
from anabranch.llm.runner.model_runner import ModelRunner
from anabranch.llm.runner.step_inputs import FixedArrays
from anabranch.llm.sequences.sequence import Scheduled
from anabranch.llm.speculative.draft_draws import DraftDraws, Kind
from anabranch.llm.speculative.draft_inputs import DraftInputs

MAX_DEPTH = 8  # levels of a tree, each a pass of the draft model


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


class TreeChain(DraftChain):
    """A draft model whose trees have one shape in a step; a key's number of drafts is their depth.

    The first pass computes the last known tokens, as in a chain. Each later one computes all nodes,
    those of the levels that are drafted already with the right tokens, and drafts the next level.
    Nodes lie after the context in the order of their tree, as the target's do. At most `width`
    nodes of a level have children, and each up to `width` of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inputs: DraftInputs,
        draws: DraftDraws,
        unseen: torch.Tensor,  # int64 [max_num_seqs, 1 + max_drafts]
        width: int,
    ) -> None:
        super().__init__(runner, inputs, draws, unseen)
        self._width = width
        self._num_nodes = unseen.shape[1] - 1
        whole, nodes = torch.int64, (self._num_nodes,)
        self._shape = FixedArrays(
            {
                "parents": (torch.int32, nodes),
                "depths": (whole, nodes),
                "sources": (whole, nodes),  # which of a level's choices: parent, then rank
                "expanded": (whole, (MAX_DEPTH, width)),  # nodes of each level with children
            },
            unseen.device,
        )

    def num_passes(self, runs: Seq[Scheduled]) -> int:
        return max(max(run.depths) for run in runs)

    def load(self, runs: Seq[Scheduled], key: ChainKey) -> None:
        """Copy the largest tree as well, of which the others are a part."""
        super().load(runs, key)
        parents = max((run.parents or () for run in runs), key=len, default=())
        arrays = self._shape.write()
        for name, padding in (("parents", -1), ("depths", 0), ("sources", 0), ("expanded", 0)):
            arrays[name][:] = padding
        arrays["parents"][: len(parents)] = parents
        depths = node_depths(parents)
        arrays["depths"][: len(parents)] = depths
        num_children: dict[int, int] = {}
        levels: list[list[int]] = [[] for _ in range(MAX_DEPTH + 1)]
        for node, parent in enumerate(parents):
            rank = num_children[parent] = num_children.get(parent, -1) + 1
            level = levels[depths[node] - 1]
            if not rank:
                level.append(parent)
            arrays["sources"][node] = level.index(parent) * self._width + rank
        for depth, level in enumerate(levels[1:]):
            arrays["expanded"][depth, : len(level)] = level
        self._shape.send(MAX_DEPTH)

    def run(self, key: ChainKey) -> torch.Tensor:
        """Drafts [batch, num_nodes] for what the buffers hold, all on the device."""
        shape, batch = self._shape.tensors, key.batch
        first = self._inputs.passes(batch, 1)[0]
        logits = self.runner.forward(
            self._inputs.ids(batch), first.positions, first.step, first.rows
        )
        choices = self._draws.rank(logits, 0, key.kind, self._width, batch)
        tokens = choices[:, shape["sources"] % self._width]
        rows = torch.arange(batch, device=tokens.device)[:, None] * self._num_nodes
        each = self._inputs.tree_pass(batch, shape["parents"])
        for level in range(1, key.num_drafts):
            wanted = (rows + shape["expanded"][level - 1]).flatten()
            logits = self.runner.forward(tokens.flatten(), each.positions, each.step, wanted)
            choices = self._draws.rank(logits, level, key.kind, self._width, batch).view(batch, -1)
            is_next = shape["depths"] == level + 1
            tokens = torch.where(is_next, choices[:, shape["sources"]], tokens)
        self._unseen[self._inputs.rows(batch), 1:] = tokens
        return tokens
