"""Launching a step: drafts, the model, sampling, and one copy to the host; nothing waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from anabranch.llm.engine.build import Built
from anabranch.llm.engine.launched import DraftChoice, Launched, PendingPrompt
from anabranch.llm.engine.step_masks import MasksBegun
from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.runner.model_runner import StepLogits
from anabranch.llm.runner.stage_clock import StageClock
from anabranch.llm.runner.step_layout import run_slots
from anabranch.llm.sampling.batch import (
    Download,
    PendingSamples,
    SampleBatch,
    SampleOutput,
    download,
)
from anabranch.llm.sampling.logprobs import prompt_logprobs
from anabranch.llm.sampling.sampler import Sampler
from anabranch.llm.sequences.sequence import Scheduled, Sequence
from anabranch.llm.speculative.proposer import Proposer


def draft_on_host(proposer: Proposer, running: list[Sequence], num_drafts: int) -> dict[str, float]:
    """Give each sequence that is decoding the drafts that the host knows, or their number.

    Returns the milliseconds of the stage, if drafts are the host's.
    """
    began = time.perf_counter()
    for seq in running:
        seq.drafts, seq.num_drafts, seq.draft_parents = [], 0, None
    if not num_drafts:
        return {}
    ready = [seq for seq in running if seq.speculates and seq.decoding]
    proposer.prepare(ready, num_drafts)
    for seq in ready:
        seq.cut_drafts()
        seq.cut_invalid_drafts()
    return {} if proposer.on_device else {"proposal": 1e3 * (time.perf_counter() - began)}


class Flying(NamedTuple):
    """How the tokens of the step in flight are taken in."""

    accept_tokens: Callable[[], None]  # by the grammars
    land: Callable[[], None]  # by everybody else


class Sampling(NamedTuple):
    """Which runs of a step are sampled, as they are before results of the last step come in."""

    runs: list[Scheduled]
    rows: list[int]  # in the sampler's tables
    on_device: torch.Tensor  # the same
    num_outputs: list[int]
    constrained: bool  # by masks, which the tokens of the step before decide
    drafted: Download | None  # drafts made on the device, on their way to the host


class Launcher:
    """Runs the stages of a step in order."""

    def __init__(
        self, built: Built, sampler: Sampler, proposer: Proposer | None, eos_ids: Iterable[int]
    ) -> None:
        self._built = built
        self._sampler = sampler
        self._proposer = proposer
        self._eos_ids = tuple(eos_ids)
        self._owners: dict[int, Sequence] = {}
        self._mask_threads = MaskThreads(pinned=built.device.type == "cuda")

    @torch.inference_mode()
    def launch(
        self,
        step: list[Scheduled],
        number: int,
        choice: DraftChoice,
        flying: Flying | None = None,
    ) -> Launched:
        """Everything of a step up to the copy of its tokens.

        Masks depend on the tokens of the step before, `flying`. These are taken in after the model
        was launched, so that the device has work meanwhile: first by the grammars, then, while
        masks are made, by everybody else.
        """
        clock = StageClock(self._built.device)
        drafts = any(run.num_drafts for run in step)
        if self._proposer is not None and self._proposer.on_device:
            self._proposer.propose(step, clock)
        sampling = self._sampling(step)
        with clock.stage("scoring" if drafts else "model"):
            logits = self._built.runner.run(step)
            graphed = logits.by_graph
            logits = self._only_sampled(step, logits)
        with clock.stage("verification" if drafts else "sampling"):
            samples, prompts, failed = self._sample(step, sampling, logits, clock, flying)
        return Launched(number, choice, step, samples, clock, graphed, prompts, failed)

    def own_row(self, seq: Sequence) -> None:
        """Register a sequence that has a new row with the sampler."""
        assert seq.row is not None
        if self._owners.get(seq.row) is seq:
            return
        if self._owners.pop(seq.row, None) is not None:
            self._sampler.remove(seq.row)
        prompt = seq.tokens[: seq.prompt_len]
        self._sampler.add(seq.row, seq.params, prompt, seq.output, seq.seed, self._eos_ids)
        self._owners[seq.row] = seq

    def _only_sampled(self, step: list[Scheduled], logits: StepLogits) -> StepLogits:
        """Keep the sampled rows only: graphs return logits for every token."""
        if logits.every is None or all(run.num_known == 1 for run in step):
            return logits
        wanted = [
            logits.every * place + row
            for place, run in enumerate(step)
            for row in range(run.num_known - 1, run.num_known + run.num_drafts)
        ]
        return StepLogits(logits.rows[self._to_device(wanted)], None, logits.by_graph)

    def _sampling(self, step: list[Scheduled]) -> Sampling:
        """What is sampled, while its sequences hold their rows."""
        runs = [run for run in step if run.samples]
        rows = [run.seq.row or 0 for run in runs]
        constrained = any(run.seq.rules for run in runs)
        on_device = self._to_device(rows)
        drafted = None
        width = max((run.num_drafts for run in runs), default=0)
        if constrained and width and self._proposer is not None and self._proposer.on_device:
            drafted = download({"drafts": self._built.unseen[on_device, 1 : 1 + width]})
        num_outputs = [run.seq.length - run.seq.prompt_len - 1 for run in runs]
        return Sampling(runs, rows, on_device, num_outputs, constrained, drafted)

    def _sample(
        self,
        step: list[Scheduled],
        sampling: Sampling,
        logits: StepLogits,
        clock: StageClock,
        flying: Flying | None,
    ) -> tuple[PendingSamples | None, dict[Scheduled, PendingPrompt], dict[str, Exception]]:
        rows, prompts = self._prompt_rows(step, logits)
        runs, table_rows = sampling.runs, sampling.on_device
        if not runs:
            return None, prompts, {}
        width = (logits.every or max(run.num_drafts for run in runs) + 1) - 1
        batch = SampleBatch(
            rows=sampling.rows,
            num_outputs=sampling.num_outputs,
            num_drafts=[run.num_drafts for run in runs],
            draft_tokens=self._draft_tokens(runs, table_rows, width) if width else None,
            padded=logits.every is not None,
            parents=_tree_parents(runs),
        )
        failed = dict[str, Exception]()
        if sampling.constrained:
            if flying is not None:
                flying.accept_tokens()
            with clock.host("masks"):
                begun = MasksBegun(runs, batch, self._sampler.vocab_size, self._mask_threads)
            try:
                if flying is not None:
                    flying.land()
            except BaseException:
                begun.wait()  # else threads would use grammars that others ask
                raise
            with clock.host("masks"):
                masks, failed = begun.finish(sampling.drafted)
            batch = replace(batch, masks=masks)
        output = self._sampler.sample(rows, batch)
        self._built.unseen[table_rows, 0] = output.last_tokens
        samples = output.to_host(self._built.saturated)
        self._compact(runs, output)
        return samples, prompts, failed

    def _compact(self, runs: list[Scheduled], output: SampleOutput) -> None:
        """Move the keys of accepted tree nodes to where their tokens now stand."""
        if output.path is None:
            return
        runner, draft = self._built.runner, self._built.draft
        shape = output.path.shape
        slots = run_slots(runs, runner.page_size, shape[1])
        on_device = self._to_device(slots.ravel().tolist()).view(shape)
        for each in (runner,) if draft is None else (runner, draft.runner):
            each.rows.move(on_device, output.path, output.num_accepted)

    def _prompt_rows(
        self, step: list[Scheduled], logits: StepLogits
    ) -> tuple[torch.Tensor, dict[Scheduled, PendingPrompt]]:
        """Separate the logits that serve a prompt's own logprobs from those to sample."""
        prompts: dict[Scheduled, PendingPrompt] = {}
        if logits.every is not None:
            return logits.rows, prompts
        kept: list[int] = []
        start = 0
        for run in step:
            wanted = run.seq.params.prompt_logprobs
            count = (1 + run.num_drafts) if run.samples else 0
            if wanted is not None and run.scores_prompt:
                count = run.num_tokens
                prompts |= self._prompt_logprobs(run, logits.rows[start : start + count], wanted)
                kept += [start + count - 1] if run.samples else []
            else:
                kept += range(start, start + count)
            start += count
        if len(kept) == start:
            return logits.rows, prompts
        return logits.rows[self._to_device(kept)], prompts

    def _prompt_logprobs(
        self, run: Scheduled, rows: torch.Tensor, wanted: int
    ) -> dict[Scheduled, PendingPrompt]:
        stop = min(run.start + run.num_tokens + 1, run.seq.prompt_len)
        targets = run.seq.tokens[run.start + 1 : stop]
        if not targets or len(run.seq.prompt_logprobs) >= stop - 1:
            return {}
        found = prompt_logprobs(rows[: len(targets)], self._to_device(targets), wanted)
        return {run: PendingPrompt(download(found._asdict()), targets, wanted)}

    def _draft_tokens(
        self, runs: list[Scheduled], table_rows: torch.Tensor, width: int
    ) -> torch.Tensor:
        if self._proposer is not None and self._proposer.on_device:
            return self._built.unseen[table_rows, 1 : 1 + width]
        drafts = [run.seq.drafts[: run.num_drafts] for run in runs]
        flat = [token for row in drafts for token in row + [0] * (width - len(row))]
        return self._to_device(flat).view(len(runs), width)

    def _to_device(self, values: list[int]) -> torch.Tensor:
        device = self._built.device
        tensor = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
        return tensor.to(device, non_blocking=True)


def _tree_parents(runs: list[Scheduled]) -> list[tuple[int, ...]] | None:
    """Parents of all drafts, those of chains too; None where no drafts form a tree."""
    if all(run.parents is None for run in runs):
        return None
    return [run.draft_parents for run in runs]
