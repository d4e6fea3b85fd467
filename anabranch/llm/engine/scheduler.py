"""Which tokens of which sequences run in the next step.

The oldest come first. A sequence runs what it has not computed: a prompt in chunks, then a token
at a time, followed by drafts. When pages run out, the youngest sequence releases its own and is
computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from anabranch.llm.sequences.page_pool import PagePool
from anabranch.llm.sequences.sequence import Scheduled, Sequence

# Tokens of a prompt that take longer than the step or two until another sequence has computed them:
# at 8 billion weights an H200 computes about as many in the time of a decode step.
WORTH_WAITING = 256
MOST_PASSED = 64  # waiting sequences that others may overtake while they wait for a prompt


class Scheduler:
    """Waiting and running sequences, the oldest first."""

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_num_tokens: int,
        max_num_scored: int | None = None,
    ) -> None:
        self.pool = pool
        self.max_num_tokens = max_num_tokens
        self.max_num_scored = max_num_scored or max_num_tokens  # tokens whose logits are kept
        self._scored_left = 0  # of a step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._rows = list(range(max_num_seqs))[::-1]

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Give back all a sequence holds, wherever it is."""
        if seq in self.running:
            self.running.remove(seq)
            self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    @property
    def expects_prompts(self) -> bool:
        """Whether the next step is likely to run tokens of prompts beside those that decode."""
        return bool(self.waiting) or any(
            not (seq.decoding or seq.exhausted) for seq in self.running
        )

    def schedule(self) -> list[Scheduled]:
        """The next step. Sequences in it count as computed from now on, drafts apart."""
        budget, self._scored_left = self.max_num_tokens, self.max_num_scored
        step: list[Scheduled] = []
        preempted = self.num_preemptions
        for seq in tuple(self.running):
            if seq.row is None or seq.exhausted:
                continue  # preempted just now, or waits for its last result
            run = self._run(seq, self._most(seq, budget))
            if run is not None:
                step.append(run)
                budget -= run.num_tokens
        if preempted == self.num_preemptions:
            step += self._admitted(budget)
        for run in step:
            run.seq.num_computed = run.start + run.num_known
            run.seq.num_pending += run.samples
        return step

    def pad(self, step: list[Scheduled], num_tokens: int) -> list[Scheduled]:
        """Give every sequence the same number of tokens, if all are decoding and pages allow it."""
        if not all(run.decoding for run in step):
            return step
        padded: list[Scheduled] = []
        for run in step:
            more = num_tokens - run.num_tokens
            if more and not run.seq.pages.grow(run.start + num_tokens):
                return step
            padded.append(replace(run, num_tokens=num_tokens, num_padding=more))
        return padded

    def _most(self, seq: Sequence, budget: int) -> int:
        """How many tokens a sequence may run: each of a scored prompt keeps a row of logits."""
        if seq.num_computed >= seq.prompt_len or not seq.scores_prompt:
            return budget
        return min(budget, self._scored_left)

    def _count_scored(self, run: Scheduled) -> Scheduled:
        self._scored_left -= run.num_tokens if run.scores_prompt else 0
        return run

    def _run(self, seq: Sequence, budget: int) -> Scheduled | None:
        if budget <= 0:
            return None
        start, uncomputed = seq.num_computed, seq.num_uncomputed
        drafts = seq.num_drafts if uncomputed == 1 else 0
        num_tokens = min(uncomputed + drafts, budget)
        drafts = min(drafts, num_tokens - 1)
        if drafts and seq.pages.num_missing(start + num_tokens) > self.pool.num_free:
            num_tokens, drafts = num_tokens - drafts, 0  # a draft is not worth a preemption
        while not seq.pages.grow(start + num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is seq:
                return None
        samples = num_tokens - drafts == uncomputed
        tree = seq.draft_parents if drafts else None
        parents = None if tree is None else tuple(tree[:drafts])
        return self._count_scored(
            Scheduled(seq, start, num_tokens, drafts, samples=samples, parents=parents)
        )

    def _admitted(self, budget: int) -> Iterator[Scheduled]:
        """Waiting sequences that begin now, the oldest first.

        One that waits for a prompt under way holds up none of those after it.
        """
        passed = 0
        while self._rows and passed < min(len(self.waiting), MOST_PASSED):
            seq = self.waiting[passed]
            if seq.num_pending or self._most(seq, budget) <= 0:
                return  # it was preempted, and the step in flight has not landed yet; or no room
            cached = 0
            if not seq.scores_prompt:  # what is found in the cache has no logits
                cached = seq.pages.match_prefix(seq.tokens)
            if not seq.scores_prompt and self._is_promised(seq):
                seq.pages.release()
                passed += 1
                continue
            run = self._admit(seq, self._most(seq, budget), cached)
            if run is None:
                return
            yield run
            budget -= run.num_tokens

    def _admit(self, seq: Sequence, budget: int, cached: int) -> Scheduled | None:
        if seq.pages.num_missing(seq.length) > self.pool.num_free:
            seq.pages.release()
            return None
        if not seq.num_preemptions:
            seq.num_cached = cached
        self.num_cached_tokens += cached
        seq.num_computed, seq.num_draft_computed = cached, seq.pages.num_drafted
        num_tokens = min(seq.num_uncomputed, budget)
        seq.pages.grow(seq.num_computed + num_tokens)
        seq.row = self._rows.pop()
        self.waiting.remove(seq)
        self.running.append(seq)
        samples = num_tokens == seq.num_uncomputed
        return self._count_scored(Scheduled(seq, seq.num_computed, num_tokens, samples=samples))

    def _is_promised(self, seq: Sequence) -> bool:
        """Whether to wait, because a running sequence computes much of what this one begins with.

        The n continuations of a prompt then compute it once, and share its pages.
        """
        return any(
            seq.pages.num_promised(seq.tokens, other.pages, other.tokens) >= WORTH_WAITING
            for other in self.running
        )

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        seq.pages.release()
        seq.num_computed = seq.num_draft_computed = 0
        if seq.row is not None:
            self._rows.append(seq.row)
            seq.row = None
