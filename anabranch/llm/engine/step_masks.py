"""Masks of a sampling step: which tokens each constrained sequence may have, at every draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.grammar.token_rules import num_words
from anabranch.llm.sampling.batch import Array, Download, SampleBatch, TokenMasks
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
    starts, sizes = _starts(batch), [1 + runs[place].num_drafts for place in places]
    rows = [
        starts[place] + row
        for place, size in zip(places, sizes, strict=True)
        for row in range(size)
    ]
    shape = len(rows), num_words(vocab_size)
    on_host = torch.empty(shape, dtype=torch.int32, pin_memory=threads.pinned)
    words = on_host.numpy()
    words.fill(-1)  # not torch.full: its threads would wait for more, on cores that masks need
    made = drafted.wait()["drafts"] if drafted is not None else None
    firsts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    rules = [rule for place in places if (rule := runs[place].seq.rules)]
    states = [rule.state for rule in rules]
    try:
        made_at = [(state, row) for state, row in zip(states, firsts, strict=True) if state]
        at_once = threads.fill(made_at, words)
    except Exception:  # of whichever request: each is asked by itself then
        at_once = False
    errors = dict[str, Exception]()
    for place, rule, state, first, size in zip(places, rules, states, firsts, sizes, strict=True):
        run = runs[place]
        drafts = run.seq.drafts if made is None else made[place].tolist()
        try:
            rule.fill(
                words[first : first + size],
                drafts[: run.num_drafts],
                run.draft_parents,
                first_made=at_once and state is not None,
            )
        except Exception as error:  # of this request alone
            errors[run.seq.request_id] = error
    return StepMasks(TokenMasks(np.array(rows, np.int64), on_host), errors)


def _starts(batch: SampleBatch) -> Array:
    """The first row of logits of every sequence."""
    if batch.padded:
        return np.arange(len(batch.rows)) * (batch.max_drafts + 1)
    lengths = np.array(batch.num_drafts, np.int64) + 1
    return np.cumsum(lengths) - lengths
