"""CUDA graphs of whole steps, one for each shape that a step may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from anabranch.llm.runner.step_layout import WHOLE, DecodeWay, Scorer

WARM_UPS = 2  # the first compiles kernels, the second sees them compiled
Progress = Callable[[str, int, int], None]  # what, done, of
Key = TypeVar("Key", bound=tuple[int | DecodeWay, ...])
Forward = Callable[[], torch.Tensor]


class GraphKey(NamedTuple):
    """The shape of a step in which every sequence runs equally many tokens."""

    q_len: int  # tokens of a sequence
    batch: int  # sequences
    way: DecodeWay = WHOLE

    @property
    def num_tokens(self) -> int:
        return self.q_len * self.batch

    def num_seqs(self, scorer: Scorer) -> int:
        """Sequences as attention sees them."""
        return self.num_tokens if scorer is Scorer.BATCH_EXPANSION else self.batch


class PromptKey(NamedTuple):
    """The shape of a step that runs a prompt, or a piece of one, and nothing else."""

    num_tokens: int


def prompt_sizes(most: int) -> list[PromptKey]:
    """Sizes of prompts worth a graph: longer ones keep the GPU busy while the host launches."""
    sizes = [64, *range(128, 1024, 128), *range(1024, 2049, 256)]
    return [PromptKey(size) for size in sizes if size <= most]


def graph_batches(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: powers of two, then every eighth."""
    small = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    return [*small, *range(16, max_num_seqs, 8), max_num_seqs]


class Graphs(Generic[Key]):
    """Captured graphs, which share their memory: only one runs at a time."""

    def __init__(self, pool: Any = None) -> None:
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self.pool = pool  # memory, of which other graphs may take as well

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def capture_all(
        self,
        keys: Sequence[Key],
        prepare: Callable[[Key], Forward],
        progress: Progress | None = None,
    ) -> None:
        """Capture every shape, ascending, after `prepare` has put inert inputs in place."""
        for done, key in enumerate(sorted(keys)):
            if progress:
                progress("capturing graphs", done, len(keys))
            self.capture(key, prepare(key))
        if progress:
            progress("capturing graphs", len(keys), len(keys))

    def capture(self, key: Key, forward: Forward) -> None:
        """Run once to compile, then record."""
        for _ in range(WARM_UPS):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = forward()
        self.pool = self.pool or graph.pool()
        self._graphs[key] = graph, output

    def clear(self) -> None:
        """Forget all graphs: a group of ranks can only end after graphs that use it."""
        self._graphs.clear()

    def fitting(self, fits: Callable[[Key], bool]) -> Key | None:
        """The smallest captured shape that fits."""
        return min((key for key in self._graphs if fits(key)), default=None)

    def replay(self, key: Key) -> torch.Tensor:
        """Run a graph over what is in the input buffers."""
        graph, output = self._graphs[key]
        graph.replay()
        return output
