"""How the decodes of a step attend: to all they have, to shared pages once, or to chosen pages.

The host chooses among captured graphs, so that a way that a step does not need costs it nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.llm.runner.graphs import GraphKey
from anabranch.llm.runner.shared_prefixes import LEVELS, SharedPrefixes
from anabranch.llm.runner.sparse_decode import SparseDecode
from anabranch.llm.runner.step import Step
from anabranch.llm.runner.step_layout import SHORT, DecodeWay, short_first
from anabranch.llm.sequences.sequence import Scheduled


@dataclass(slots=True)
class StepChoice:
    """The ways that an engine was built for."""

    prefixes: SharedPrefixes | None = None  # None: every sequence is attended to apart
    sparse: SparseDecode | None = None  # None: decodes attend to all of a context

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
