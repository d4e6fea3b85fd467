"""A step in flight: what was launched, and what it brings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.llm.runner.stage_clock import StageClock
from anabranch.llm.sampling.batch import Download, PendingSamples
from anabranch.llm.sampling.token_logprobs import Logprob, TokenLogprobs, top_entries
from anabranch.llm.sequences.sequence import Scheduled


class DraftChoice(NamedTuple):
    """How many drafts a step was to have, decided before it was scheduled, and why."""

    at: float  # seconds of time.perf_counter
    batch: int  # sequences that were running
    num_drafts: int  # for each of them, at most
    with_prompts: bool  # whether prompts were expected to run beside them


class PendingPrompt(NamedTuple):
    """Logprobs of a chunk of a prompt, on their way to the host."""

    copy: Download
    targets: list[int]
    wanted: int

    def wait(self) -> list[TokenLogprobs]:
        """An entry for each token of the chunk but the first of the prompt."""
        arrays = self.copy.wait()
        entries: list[TokenLogprobs] = []
        for place, token in enumerate(self.targets):
            entry = top_entries(arrays["top_ids"][place], arrays["top"][place], self.wanted)
            chosen, rank = float(arrays["chosen"][place]), int(arrays["ranks"][place])
            entry[token] = Logprob(chosen, rank)
            entries.append(entry)
        return entries


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step in flight."""

    number: int
    choice: DraftChoice
    step: list[Scheduled]
    samples: PendingSamples | None
    clock: StageClock
    graphed: bool
    prompts: dict[Scheduled, PendingPrompt] = field(default_factory=dict[Scheduled, PendingPrompt])
    failed: dict[str, Exception] = field(default_factory=dict[str, Exception])  # by request

    def accept_tokens(self) -> None:
        """Give its tokens to their grammars, before anybody else."""
        self.clock.wait()
        if self.samples is None:
            return
        runs = (run for run in self.step if run.samples)
        for run, tokens in zip(runs, self.samples.wait().tokens, strict=True):
            rules = run.seq.rules
            if rules is not None and len(tokens) == 1 and not run.seq.finished:
                rules.accept_ahead(tokens[0])

    @property
    def has_drafts(self) -> bool:
        """Whether the host does not know yet how many tokens come out."""
        return any(run.num_drafts for run in self.step)

    def land_prompt(self, run: Scheduled) -> None:
        """Keep logprobs of a prompt's tokens by position: a preempted prompt is run again."""
        if run in self.prompts:
            entries = self.prompts[run].wait()
            run.seq.prompt_logprobs[run.start : run.start + len(entries)] = entries
