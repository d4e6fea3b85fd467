"""A step as arrays: which token goes where, before anything is copied to the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anabranch.compositions.tree import MAX_NODES
from anabranch.llm.sequences.sequence import Scheduled


class HostLens(NamedTuple):
    """New tokens and earlier keys of every sequence."""

    q_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    def within(self, tokens: slice) -> HostLens:
        """Those of the sequences whose tokens are some of the step's."""
        ends = accumulate(self.q_lens)
        seqs = [seq for seq, end in enumerate(ends) if tokens.start < end <= tokens.stop]
        return HostLens(*(tuple(lens[seq] for seq in seqs) for lens in self))


Ints = NDArray[np.int64]
Pages: TypeAlias = "array[int]"
SHORT = 32  # queries of a sequence up to which it is attended to like a decode


class DecodeWay(NamedTuple):
    """How sequences with few queries attend to their keys."""

    levels: int = 0  # in which they may share leading pages, read once; 0 reads all of each
    selects: bool = False  # to some pages of long contexts


WHOLE = DecodeWay()  # each sequence to all of its keys


class Scorer(StrEnum):
    """How a sequence and its drafts are attended to."""

    MULTI_QUERY = "multi-query"  # one sequence of several queries
    BATCH_EXPANSION = "batch-expansion"  # every token a sequence of its own


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Tokens of all sequences, packed; sequences as attention sees them.

    A token's id is `ids`, or, where `sources` is not negative, that entry of the device's table of
    tokens the host has not seen.
    """

    ids: Ints
    sources: Ints
    positions: Ints
    slots: Ints
    cu_seqlens: Ints
    seq_lens: Ints
    pages: list[Pages]  # for each sequence
    logit_rows: Ints
    num_short: int  # sequences with few queries, if they come first
    parents: Ints | None = None  # of the short sequences' tokens, each counted in its sequence

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_seqs(self) -> int:
        """Sequences as attention sees them."""
        return len(self.seq_lens)

    @property
    def short(self) -> tuple[int, int] | None:
        """Tokens and sequences in front that are better attended to apart from the rest."""
        if 0 < self.num_short < self.num_seqs:
            return int(self.cu_seqlens[self.num_short]), self.num_short
        return None

    def lens(self) -> HostLens:
        """New tokens and earlier keys of every sequence."""
        q_lens = np.diff(self.cu_seqlens)
        contexts = self.seq_lens - q_lens
        return HostLens(tuple(map(int, q_lens)), tuple(map(int, contexts)))

    def is_fresh(self, first: int) -> bool:
        """Whether all keys of the sequences from `first` on are tokens of this step."""
        return np.array_equal(self.seq_lens[first:], np.diff(self.cu_seqlens)[first:])


def is_short(run: Scheduled, most_short: int = SHORT) -> bool:
    """Whether a sequence is attended to like a decode."""
    return run.num_tokens <= (most_short if run.parents is None else MAX_NODES)


def short_first(step: list[Scheduled], short: int = SHORT) -> list[Scheduled]:
    """Sequences with few queries before the others, as attention wants them."""
    are_short = [is_short(run, short) for run in step]
    if all(are_short):
        return step
    return sorted(step, key=lambda run: not is_short(run, short))


def lay_out(
    step: Sequence[Scheduled],
    scorer: Scorer,
    page_size: int,
    table_width: int,
    every_row: bool,
    most_short: int = SHORT,
    *,
    trees: bool = False,
) -> StepLayout:
    """Arrays of a step, short sequences first. `every_row` asks for the logits of every token.

    With `trees`, short sequences get parents, from which the device makes masks and positions; with
    `every_row`, all do.
    """
    bounds = np.cumsum([0, *[run.num_tokens for run in step]])
    ids, sources = np.zeros(bounds[-1], np.int64), np.full(bounds[-1], -1, np.int64)
    positions, slots = np.empty_like(ids), np.empty_like(ids)
    starts = bounds.tolist()
    ones = [i for i, run in enumerate(step) if run.num_tokens == 1]
    if ones:  # as most are, so without arrays of one
        runs = [step[i] for i in ones]
        places = bounds[ones]
        ids[places], sources[places] = _next_tokens(runs, table_width)
        positions[places] = [run.start for run in runs]
        slots[places] = [_slot(run, page_size) for run in runs]
    for i, run in enumerate(step) if len(ones) < len(step) else ():
        if run.num_tokens == 1:
            continue
        span = slice(starts[i], starts[i + 1])
        _fill_ids(run, ids[span], sources[span], table_width)
        place = np.arange(run.start, run.start + run.num_tokens)
        last = run.start + run.num_tokens - run.num_padding - 1
        positions[span] = np.minimum(place, last)  # padding may lie after the context
        slots[span] = _slots(run, place, page_size)
    cu_seqlens, seq_lens, pages = _sequences(step, bounds, scorer)
    logit_rows = np.arange(len(ids)) if every_row else _logit_rows(step, starts)
    num_short = _count_short(step, cu_seqlens, scorer, most_short)
    # a graph has equally many tokens of all, for which one mask serves
    parents = _parents(step if every_row else step[:num_short]) if trees else None
    return StepLayout(
        ids, sources, positions, slots, cu_seqlens, seq_lens, pages, logit_rows, num_short, parents
    )


def run_slots(runs: Sequence[Scheduled], page_size: int, width: int) -> Ints:
    """Where the keys of each run's first `width` tokens lie, [num_runs, width]; -1 after them."""
    found = np.full((len(runs), width), -1, np.int64)
    for row, run in zip(found, runs, strict=True):
        size = min(run.num_tokens, width)
        row[:size] = _slots(run, np.arange(run.start, run.start + size), page_size)
    return found


def _count_short(
    step: Sequence[Scheduled], cu_seqlens: Ints, scorer: Scorer, most_short: int
) -> int:
    """How many sequences are short, if they all come first."""
    lengths = np.diff(cu_seqlens)
    if scorer is Scorer.BATCH_EXPANSION or lengths.max(initial=0) <= most_short:
        short = lengths <= most_short
    else:
        short = np.array([is_short(run, most_short) for run in step], bool)
    return int(short.sum()) if not np.diff(short.astype(np.int8)).clip(0).any() else 0


def _parents(runs: Sequence[Scheduled]) -> Ints:
    """Known tokens form a chain, to whose end the drafts are tied; padding follows the context."""
    found: list[int] = []
    for run in runs:
        last = run.num_known - 1
        found += range(-1, last)
        drafts = range(-1, run.num_drafts - 1) if run.parents is None else run.parents
        found += [last + 1 + parent for parent in drafts]
        found += [-1] * run.num_padding
    return np.array(found, np.int64)


def _slots(run: Scheduled, place: Ints, page_size: int) -> Ints:
    first, stop = run.start // page_size, (run.start + run.num_tokens - 1) // page_size + 1
    pages = np.array(run.seq.pages.pages[first:stop], np.int64)
    return pages[place // page_size - first] * page_size + place % page_size


def _slot(run: Scheduled, page_size: int) -> int:
    """Where the keys of a run's first token lie."""
    page, place = divmod(run.start, page_size)
    return run.seq.pages.pages[page] * page_size + place


def _next_tokens(runs: Sequence[Scheduled], table_width: int) -> tuple[list[int], list[int]]:
    """Ids and sources of runs of one token, which the host knows or the device."""
    ids, sources = [0] * len(runs), [-1] * len(runs)
    for i, run in enumerate(runs):
        seq = run.seq
        if run.start < len(seq.tokens):
            ids[i] = seq.tokens[run.start]
        else:
            assert seq.row is not None
            sources[i] = seq.row * table_width
    return ids, sources


def _fill_ids(run: Scheduled, ids: Ints, sources: Ints, table_width: int) -> None:
    known = run.seq.tokens[run.start : run.start + run.num_known]
    ids[: len(known)] = known
    row = run.seq.row
    assert row is not None
    if len(known) < run.num_known:  # the last one is pending
        sources[len(known)] = row * table_width
    drafts = slice(run.num_known, run.num_known + run.num_drafts)
    if run.seq.drafts:
        ids[drafts] = run.seq.drafts[: run.num_drafts]
    elif run.num_drafts:
        sources[drafts] = row * table_width + 1 + np.arange(run.num_drafts)


def _logit_rows(step: Sequence[Scheduled], starts: Sequence[int]) -> Ints:
    """Those that are sampled, and those of prompts that are scored."""
    rows: list[int] = []
    for run, start in zip(step, starts, strict=False):
        if run.scores_prompt:
            rows += range(start, start + run.num_tokens)
        elif run.samples:
            rows += range(start + max(run.num_known - 1, 0), start + run.num_known + run.num_drafts)
    return np.array(rows, np.int64)


def _sequences(
    step: Sequence[Scheduled], bounds: Ints, scorer: Scorer
) -> tuple[Ints, Ints, list[Pages]]:
    if scorer is Scorer.MULTI_QUERY:
        ends = np.array([run.start for run in step], np.int64) + np.diff(bounds)
        return bounds, ends, [run.seq.pages.pages for run in step]
    cu_seqlens, seq_lens, pages = [0], list[int](), list[Pages]()
    for run, stop in zip(step, bounds[1:], strict=True):
        expand = run.num_tokens > run.num_known
        ends = range(int(stop) - run.num_tokens + 1, int(stop) + 1) if expand else (int(stop),)
        cu_seqlens.extend(ends)
        seq_lens.extend(run.start + run.num_tokens - (int(stop) - end) for end in ends)
        pages.extend([run.seq.pages.pages] * len(ends))
    return np.array(cu_seqlens), np.array(seq_lens, np.int64), pages
