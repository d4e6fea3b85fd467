"""CUDA graphs of whole steps, one for each batch size and number of tokens a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from anabranch.engine.layout import Scorer

WARM_UPS = 2  # the first compiles kernels, the second sees them compiled


class GraphKey(NamedTuple):
    """A shape that a graph is captured for."""

    q_len: int  # tokens of a sequence
    batch: int  # sequences

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return self.q_len * self.batch

    def num_seqs(self, scorer: Scorer) -> int:
        """Sequences as attention sees them."""
        return self.num_tokens if scorer is Scorer.BATCH_EXPANSION else self.batch


def graph_batches(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: powers of two, then every eighth."""
    small = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*small, *range(16, max_num_seqs, 8), max_num_seqs]


class Graphs:
    """Captured graphs, which share their memory: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, key: GraphKey, forward: Callable[[], torch.Tensor]) -> None:
        """Run once to compile, then record."""
        for _ in range(WARM_UPS):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph, logits

    def fitting(self, batch: int, q_len: int) -> GraphKey | None:
        """The smallest captured shape that holds a batch."""
        sizes = [key for key in self._graphs if key.q_len == q_len and key.batch >= batch]
        return min(sizes, default=None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Run a graph over what is in the input buffers."""
        graph, logits = self._graphs[key]
        graph.replay()
        return logits
