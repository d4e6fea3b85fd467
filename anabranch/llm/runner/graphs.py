"""CUDA graphs of whole steps, one for each shape that a step may have, and the choice among them.

Decodes attend to all they have, to shared pages once, or to chosen pages: each way has graphs of
its own, so that one that a step does not need costs it nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from anabranch.llm.runner.shared_prefixes import LEVELS, SharedPrefixes
from anabranch.llm.runner.sparse_decode import SparseDecode
from anabranch.llm.runner.step import Step
from anabranch.llm.runner.step_layout import (
    SHORT,
    WHOLE,
    DecodeWay,
    Scorer,
    StepLayout,
    short_first,
)
from anabranch.llm.sequences.sequence import Scheduled

# Keys that the tokens of a prompt see, counted for each, from which decoding the keys of a
# quantised cache, which no graph can, saves more than a graph: 2048 tokens without a context, for
# which an H200 takes some 50 us a layer and codes as they are 130 to 170.
GRAPH_PAIRS = 1 << 20
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


@dataclass(frozen=True, slots=True)
class StepWork:
    """A prepared step. Small arrays only, so it can be sent to another process."""

    layout: StepLayout
    key: GraphKey | PromptKey | None  # None: no graph fits, the model is called
    way: DecodeWay = WHOLE

    @property
    def reads_unseen(self) -> bool:
        """Whether some token is known on rank 0's device only."""
        return bool((self.layout.sources >= 0).any())


@dataclass(slots=True)
class StepChoice:
    """The ways that an engine was built for."""

    prefixes: SharedPrefixes | None = None  # None: every sequence is attended to apart
    sparse: SparseDecode | None = None  # None: decodes attend to all of a context
    max_workspace_mib: float | None = None  # for decoded keys of prompts, where decoding pays

    @property
    def most_short(self) -> int:
        """Tokens of a run up to which it is attended to like a decode; with `sparse`, one."""
        return SHORT if self.sparse is None else 1

    def in_order(self, step: list[Scheduled]) -> list[Scheduled]:
        """Sequences with few queries first, those that share leading pages side by side."""
        ordered = step if self.prefixes is None else self.prefixes.order(step)
        return short_first(ordered, self.most_short)

    def way(self, step: Sequence[Scheduled]) -> DecodeWay:
        """For the sequences of a step that have few queries."""
        lengths = (run.start + 1 for run in step if run.num_tokens == 1)
        if self.sparse is not None and self.sparse.needed(max(lengths, default=0)):
            return DecodeWay(selects=True)
        return DecodeWay(0 if self.prefixes is None else self.prefixes.levels(step))

    def equip(self, step: Step) -> None:
        """Give a step what its ways need."""
        step.sparse = self.sparse
        step.max_workspace_mib = self.max_workspace_mib
        if self.prefixes is not None:
            step.min_saved_keys = self.prefixes.min_saved_keys
            step.min_saved_bytes = self.prefixes.min_saved_bytes

    def keys(self, plain: Sequence[GraphKey]) -> list[GraphKey]:
        """Graphs of these shapes for every way."""
        keys = list(plain)
        if self.prefixes is not None:
            sharing = [key for key in plain if key.batch > 1]
            keys += [key._replace(way=DecodeWay(n)) for n in LEVELS for key in sharing]
        if self.sparse is not None:
            one = [key for key in plain if key.q_len == 1]
            keys += [key._replace(way=DecodeWay(selects=True)) for key in one]
        return keys


def fitting_key(
    keys: Iterable[GraphKey], q_len: int, batch: int, way: DecodeWay
) -> GraphKey | None:
    """The smallest graph for a step; where none shares prefixes, one that reads all of each."""
    fits = [key for key in keys if key.q_len == q_len and key.batch >= batch]
    ways = (way, DecodeWay(selects=way.selects))
    return next((min(x) for y in ways if (x := [key for key in fits if key.way == y])), None)


def sees_many_keys(run: Scheduled) -> bool:
    """Whether a prompt over a quantised cache is better off without a graph."""
    return run.num_tokens * (run.start + run.num_tokens / 2) > GRAPH_PAIRS
