"""Masks of a sampling step: which tokens each constrained sequence may have, at every draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.grammar.token_rules import num_words
from anabranch.llm.sampling.batch import SampleBatch, TokenMasks
from anabranch.llm.sampling.transfer import Array, Download
from anabranch.llm.sequences.sequence import Scheduled


class StepMasks(NamedTuple):
    """Masks, and the requests whose grammar failed."""

    masks: TokenMasks | None
    failed: dict[str, Exception]


def step_masks(
    runs: Seq[Scheduled],
    batch: SampleBatch,
    vocab_size: int,
    drafted: Download | None,
    threads: MaskThreads,
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
    states = [(rule.state, first) for rule, first in zip(rules, firsts, strict=True) if rule.state]
    try:
        at_once = threads.fill(states, words)
    except Exception:  # of whichever request: each is asked by itself then
        at_once = False
    errors = dict[str, Exception]()
    for place, rule, first, end in zip(places, rules, firsts, ends, strict=True):
        run = runs[place]
        drafts = run.seq.drafts if made is None else made[place].tolist()
        first_made = at_once and rule.state is not None
        try:
            rule.fill(
                words[first:end], drafts[: run.num_drafts], run.draft_parents, first_made=first_made
            )
        except Exception as error:  # of this request alone
            errors[run.seq.request_id] = error
    return StepMasks(TokenMasks(np.array(rows, np.int64), words), errors)


def _starts(batch: SampleBatch) -> Array:
    """The first row of logits of every sequence."""
    if batch.padded:
        return np.arange(len(batch.rows)) * (batch.max_drafts + 1)
    lengths = np.array(batch.num_drafts, np.int64) + 1
    return np.cumsum(lengths) - lengths
