"""Masks of a sampling step: which tokens each constrained sequence may have, at every draft."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.grammar.token_rules import num_words
from anabranch.llm.sampling.batch import Array, Download, SampleBatch, TokenMasks
from anabranch.llm.sequences.sequence import Scheduled

log = logging.getLogger("anabranch")


class StepMasks(NamedTuple):
    """Masks, and the requests whose grammar failed."""

    masks: TokenMasks | None
    failed: dict[str, Exception]


class MasksBegun:
    """Masks of the runs of a batch, once their grammars have all tokens before their drafts.

    Threads make the first of each run; `finish` makes the others, and waits.
    """

    def __init__(
        self, runs: Seq[Scheduled], batch: SampleBatch, vocab_size: int, threads: MaskThreads
    ) -> None:
        self._places = [
            place for place, run in enumerate(runs) if run.seq.rules and not run.seq.finished
        ]
        self._runs = [runs[place] for place in self._places]
        self._rules = [rule for run in self._runs if (rule := run.seq.rules)]
        self._sizes = [1 + run.num_drafts for run in self._runs]
        starts = _starts(batch)
        self._rows = [
            starts[place] + row
            for place, size in zip(self._places, self._sizes, strict=True)
            for row in range(size)
        ]
        shape = len(self._rows), num_words(vocab_size)
        self._on_host = torch.empty(shape, dtype=torch.int32, pin_memory=threads.pinned)
        self._words = self._on_host.numpy()
        self._words.fill(-1)  # torch's threads would wait for more, on cores that masks need
        ends = accumulate(self._sizes)
        self._firsts = [end - size for end, size in zip(ends, self._sizes, strict=True)]
        self._errors = dict[str, Exception]()
        for run, rule in zip(self._runs, self._rules, strict=True):
            try:
                rule.leave_failed_lexer()
            except Exception as error:  # of this request alone
                self._errors[run.seq.request_id] = error
        states = [rule.state for rule in self._rules]
        self._threaded = [state is not None for state in states]
        rows = [(state, row) for state, row in zip(states, self._firsts, strict=True) if state]
        self._under_way: Future[None] | None = None
        try:
            self._under_way = threads.start(rows, self._words)
        except Exception:  # no thread can be had
            log.exception("masks are made one by one")

    def finish(self, drafted: Download | None) -> StepMasks:
        """`drafted` [num_seqs, max_drafts] brings drafts that were made on the device."""
        made = drafted.wait()["drafts"] if drafted is not None else None
        at_once = self.wait()
        for i, run in enumerate(self._runs):
            if run.seq.finished or run.seq.request_id in self._errors:
                continue  # by the token before, or by an error
            drafts = run.seq.drafts if made is None else made[self._places[i]].tolist()
            first = self._firsts[i]
            try:
                self._rules[i].fill(
                    self._words[first : first + self._sizes[i]],
                    drafts[: run.num_drafts],
                    run.draft_parents,
                    first_made=at_once and self._threaded[i],
                )
            except Exception as error:  # of this request alone
                self._errors[run.seq.request_id] = error
        masks = TokenMasks(np.array(self._rows, np.int64), self._on_host) if self._rows else None
        return StepMasks(masks, self._errors)

    def wait(self) -> bool:
        """Until no thread uses a grammar any more; whether they made the first masks."""
        if self._under_way is None:
            return False
        try:
            self._under_way.result()
        except Exception:  # of whichever request: each is asked by itself then
            return False
        return True


def _starts(batch: SampleBatch) -> Array:
    """The first row of logits of every sequence."""
    if batch.padded:
        return np.arange(len(batch.rows)) * (batch.max_drafts + 1)
    lengths = np.array(batch.num_drafts, np.int64) + 1
    return np.cumsum(lengths) - lengths
