"""Masks of a sampling step: which tokens each constrained sequence may have, at every draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from anabranch.llm.grammar.grammar_state import GrammarState, Words
from anabranch.llm.grammar.mask_threads import MasksUnderWay, MaskThreads
from anabranch.llm.grammar.token_rules import TokenRules, num_words
from anabranch.llm.sampling.batch import SampleBatch, TokenMasks
from anabranch.llm.sampling.transfer import Array, Download
from anabranch.llm.sequences.sequence import Scheduled


class StepMasks(NamedTuple):
    """Masks, and the requests whose grammar failed."""

    masks: TokenMasks | None
    failed: dict[str, Exception]


class MasksAhead:
    """Masks begun as soon as tokens are there, while the rest of their arrival is worked on."""

    def __init__(self, vocab_size: int, threads: MaskThreads) -> None:
        self._num_words, self._threads = num_words(vocab_size), threads
        self._under_way: MasksUnderWay | None = None
        self._words = np.empty((0, self._num_words), np.int32)
        self._rows: dict[TokenRules, tuple[int, int]] = {}  # row, and tokens that it follows

    def begin(self, runs: Seq[Scheduled], tokens: Seq[Seq[int]]) -> None:
        """Take the tokens of runs that got one each, and begin the masks that follow them."""
        self.forget()
        given = [
            (run.seq.rules, found[0])
            for run, found in zip(runs, tokens, strict=True)
            if run.seq.rules and run.seq.rules.state and not run.seq.finished and len(found) == 1
        ]
        if not self._threads.can_start([rule.state for rule, _ in given if rule.state]):
            return
        for rule, token in given:
            rule.accept_ahead(token)
        rules = [rule for rule, _ in given if rule.state]
        self._words = np.full((len(rules), self._num_words), -1, np.int32)
        self._rows = {rule: (row, rule.num_accepted) for row, rule in enumerate(rules)}
        states = [(rule.state, row) for row, rule in enumerate(rules) if rule.state]
        self._under_way = self._threads.start(states, self._words)

    def take(self, rules: Seq[TokenRules], firsts: Seq[int], words: Words) -> set[TokenRules]:
        """Write what was begun into rows of `words`; whose first mask that is."""
        if self._under_way is None or not self._finished():
            return set()
        found = [
            (rule, first, row)
            for rule, first in zip(rules, firsts, strict=True)
            for row, num_accepted in [self._rows.get(rule, (0, -1))]
            if num_accepted == rule.num_accepted
        ]
        if found:
            words[[first for _, first, _ in found]] = self._words[[row for *_, row in found]]
        self.forget()
        return {rule for rule, *_ in found}

    def forget(self) -> None:
        """What was begun and is not needed; nobody writes after it."""
        if self._under_way is not None:
            self._finished()
        self._under_way = None

    def _finished(self) -> bool:
        assert self._under_way is not None
        try:
            self._under_way.wait()
        except Exception:  # of whichever request: each is asked by itself then
            return False
        return True


def step_masks(
    runs: Seq[Scheduled],
    batch: SampleBatch,
    vocab_size: int,
    drafted: Download | None,
    threads: MaskThreads,
    ahead: MasksAhead | None = None,
) -> StepMasks:
    """Masks of the runs of a batch, once the host knows all tokens before their drafts.

    `drafted` [num_seqs, max_drafts] brings drafts that were made on the device.
    """
    places = [place for place, run in enumerate(runs) if run.seq.rules and not run.seq.finished]
    if not places:
        return StepMasks(None, {})
    starts = _starts(batch)
    rows = [starts[place] + row for place in places for row in range(1 + batch.num_drafts[place])]
    words = np.full((len(rows), num_words(vocab_size)), -1, np.int32)
    made = drafted.wait()["drafts"] if drafted is not None else None
    ends = np.cumsum([1 + runs[place].num_drafts for place in places]).tolist()
    firsts = [end - 1 - runs[place].num_drafts for place, end in zip(places, ends, strict=True)]
    rules = [rule for place in places if (rule := runs[place].seq.rules)]
    begun = ahead.take(rules, firsts, words) if ahead is not None else set[TokenRules]()
    states = [
        (rule.state, first)
        for rule, first in zip(rules, firsts, strict=True)
        if rule not in begun and rule.state
    ]
    at_once = _fill_at_once(states, words, threads)
    errors = dict[str, Exception]()
    for place, rule, first, end in zip(places, rules, firsts, ends, strict=True):
        run = runs[place]
        drafts = run.seq.drafts if made is None else made[place].tolist()
        first_made = rule in begun or (at_once and rule.state is not None)
        try:
            rule.fill(
                words[first:end], drafts[: run.num_drafts], run.draft_parents, first_made=first_made
            )
        except Exception as error:  # of this request alone
            errors[run.seq.request_id] = error
    return StepMasks(TokenMasks(np.array(rows, np.int64), words), errors)


def _fill_at_once(
    states: Seq[tuple[GrammarState, int]], words: Words, threads: MaskThreads
) -> bool:
    try:
        under_way = threads.start(states, words)
        if under_way is not None:
            under_way.wait()
    except Exception:  # of whichever request: each is asked by itself then
        return False
    return under_way is not None


def _starts(batch: SampleBatch) -> Array:
    """The first row of logits of every sequence."""
    if batch.padded:
        return np.arange(len(batch.rows)) * (batch.max_drafts + 1)
    lengths = np.array(batch.num_drafts, np.int64) + 1
    return np.cumsum(lengths) - lengths
