"""The engine: requests in, a step at a time, tokens out.

A step is scheduled, launched and, a step later, finished: while the GPU computes one step the host
finishes the one before it. Drafts depend on the tokens before them, so with drafts a step is
finished before the next is scheduled.
"""

from __future__ import annotations

import logging
import time

from anabranch.llm.engine.admission import Admission, Prompt, sampling_defaults
from anabranch.llm.engine.build import eos_ids, vocab_size
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.drafters import make_proposer
from anabranch.llm.engine.launch import Flying, Launcher, draft_on_host
from anabranch.llm.engine.launched import DraftChoice, Launched
from anabranch.llm.engine.limits import SCORED_TOKENS
from anabranch.llm.engine.ranks import build_engine
from anabranch.llm.engine.request import Request, arrive
from anabranch.llm.engine.scheduler import Scheduler
from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar, GrammarCompiler
from anabranch.llm.runner.model_runner import Progress
from anabranch.llm.sampling.batch import HostLogprobs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.sampler import Sampler
from anabranch.llm.sequences.page_pool import PagePool
from anabranch.llm.sequences.sequence import Scheduled, Sequence
from anabranch.llm.speculative.adaptive import AdaptiveDrafts

log = logging.getLogger("anabranch")
NONE: list[int] = []  # tokens


class Engine:
    """Continuous batching over one model. Not thread-safe: one caller at a time."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        built, self.ranks = build_engine(config, progress)
        self.config = config
        self.limits = built.limits
        self.device = built.device
        self.model_name = built.target.name
        self.tokenizer = built.target.tokenizer
        self.model_config = built.target.config
        self.vocab_size = vocab_size(built.target)
        self.eos_ids = eos_ids(built)
        self.sampling_defaults = sampling_defaults(built.target.model, config.generation_config)
        self.stats = EngineStats()
        self.pool = PagePool(built.limits.num_pages)
        self.scheduler = Scheduler(
            self.pool, self.limits.max_num_seqs, self.limits.max_num_tokens, SCORED_TOKENS
        )
        sampler = Sampler(built.rows, self.device)
        self._proposer = make_proposer(config.speculative, built.draft, self.limits)
        self.admission = Admission(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            eos_ids=frozenset(self.eos_ids),
            limits=self.limits,
            pool=self.pool,
            prefix_caching=config.prefix_caching,
            makes_drafts=self._proposer is not None,
            seed=config.seed,
            grammars=GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_ids),
        )
        self.adaptive = AdaptiveDrafts(
            built.limits.max_drafts,
            enabled=config.speculative is not None and config.speculative.adaptive,
            has_trees=config.speculative is not None and config.speculative.has_trees,
        )
        self._launcher = Launcher(built, sampler, self._proposer, self.eos_ids)
        self._requests: dict[str, Request] = {}
        self._pipelined = self.device.type == "cuda"
        self._pads = len(built.runner.graphs) > 0  # graphs hold equally many tokens of all
        self.choice = built.runner.choice  # of how steps attend
        self._flying: Launched | None = None
        self._landed_at = 0.0  # seconds of time.perf_counter

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for pages."""
        return len(self.scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._flying)

    def compile_grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar of a request, if it has one; from any thread: it may take seconds, aside."""
        return self.admission.grammar(params, aside=True)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Queue a request; a bad one is refused here and disturbs no other."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already")
        request = self.admission.request(request_id, prompt, params, grammar)
        self._requests[request_id] = request
        for seq in request.seqs:
            self.scheduler.add(seq)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request now; its pages are free for the next step."""
        return self._end(request_id, "abort")

    def _end(self, request_id: str, reason: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for seq in request.seqs:
            if not seq.finished:
                seq.finish_reason = reason
                self._forget(seq)
        return request

    def _fail(self, request_id: str, error: Exception) -> list[Request]:
        """End one request because of an error that is its own; the others go on."""
        log.error("request %s failed", request_id, exc_info=error)
        request = self._end(request_id, "error")
        if request is None:
            return []
        request.error = f"{type(error).__name__}: {error}"
        return [request]

    def step(self) -> list[Request]:
        """Run one step; the requests that have new tokens or are over."""
        changed: list[Request] = []
        choice = self._choose_drafts()
        if self._flying and (choice.num_drafts or self._flying.has_drafts):
            changed += self._land()
        if self._proposer is not None:
            drafted = draft_on_host(self._proposer, self.scheduler.running, choice.num_drafts)
            self.stats.add_times(drafted)
        step, failed = self._own_rows(self.choice.in_order(self.scheduler.schedule()))
        changed += failed
        if self._pads and choice.num_drafts and any(run.num_drafts for run in step):
            step = self.scheduler.pad(step, 1 + self.limits.max_drafts)
        with self.ranks.guard():
            launched = self._launch(step, choice, changed) if step else None
        self.stats.num_steps += launched is not None
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.num_cached_tokens = self.scheduler.num_cached_tokens
        if self._flying:
            changed += self._land()
        for request_id, error in (launched.failed if launched else {}).items():
            changed += self._fail(request_id, error)
        self._flying = launched
        if launched and not self._pipelined:
            changed += self._land()
        return changed

    def _launch(
        self, step: list[Scheduled], choice: DraftChoice, changed: list[Request]
    ) -> Launched:
        """Launch a step; where it has masks, what is in flight lands meanwhile."""
        flying = None
        if self._flying:
            flying = Flying(self._flying.accept_tokens, lambda: changed.extend(self._land()))
        return self._launcher.launch(step, self.stats.num_steps, choice, flying)

    def _own_rows(self, step: list[Scheduled]) -> tuple[list[Scheduled], list[Request]]:
        """The runs whose sampling could be set up, and the requests for which that failed."""
        kept, failed = list[Scheduled](), list[Request]()
        for run in step:
            if run.seq.finished:
                continue  # another sequence of its request failed just now
            try:
                self._launcher.own_row(run.seq)
                kept.append(run)
            except Exception as error:
                failed += self._fail(run.seq.request_id, error)
        return [run for run in kept if not run.seq.finished], failed

    def _choose_drafts(self) -> DraftChoice:
        """How many drafts each sequence that is decoding should get at most."""
        began, running = time.perf_counter(), self.scheduler.running
        if self._proposer is None:
            return DraftChoice(began, len(running), 0, with_prompts=False)
        with_prompts, num_drafts = self.scheduler.expects_prompts, 0
        if any(seq.speculates and seq.decoding for seq in running):
            num_drafts = self.adaptive.choose(len(running), with_prompts=with_prompts)
        return DraftChoice(began, len(running), num_drafts, with_prompts)

    def _land(self) -> list[Request]:
        """Take in the results of the step in flight."""
        launched, self._flying = self._flying, None
        assert launched is not None
        launched.clock.wait()
        samples = launched.samples.wait() if launched.samples else None
        self.stats.add_times(launched.clock.read())
        self.stats.add_host_times(launched.clock.host_ms)
        now = time.perf_counter()
        self.stats.num_graph_steps += launched.graphed
        if samples is not None:
            self.stats.count_saturated(samples.saturated)
            self.stats.num_nan_rows += samples.num_nan_rows
        changed: dict[str, Request] = {}
        place = 0
        for run in launched.step:
            self.stats.num_prompt_tokens += 0 if run.decoding else run.num_known
            tokens, accepted, logprobs = NONE, NONE, None
            if run.samples and samples is not None:
                tokens = samples.tokens[place]
                accepted = samples.accepted[place]
                logprobs = samples.logprobs[place] if samples.logprobs else None
                place += 1
            try:
                self._land_run(run, tokens, accepted, logprobs, launched, changed)
            except Exception as error:
                for request in self._fail(run.seq.request_id, error):
                    changed[request.request_id] = request
        if self._proposer is not None and any(run.decoding for run in launched.step):
            choice = launched.choice
            since = max(choice.at, self._landed_at)  # what the host did in between counts
            self.adaptive.observe(
                choice.batch,
                choice.num_drafts,
                1e3 * (now - since),
                with_prompts=choice.with_prompts,
            )
        self._landed_at = now
        return list(changed.values())

    def _land_run(
        self,
        run: Scheduled,
        tokens: list[int],  # none for a part of a prompt, or where none could be chosen
        accepted: list[int],  # which drafts
        logprobs: HostLogprobs | None,
        launched: Launched,
        changed: dict[str, Request],
    ) -> None:
        seq = run.seq
        seq.num_pending -= run.samples
        if seq.finished:
            return  # aborted, or stopped while this step was in flight
        if launched.prompts:
            launched.land_prompt(run)
        if run.samples and not tokens:
            raise FloatingPointError(
                f"all logits after {len(seq.tokens)} tokens are NaN or -inf: none can be chosen"
            )
        request = self._requests[seq.request_id]
        if tokens:
            if seq.speculates:
                self._count(run, len(accepted), launched.choice.num_drafts)
            seq.num_computed += len(accepted) if seq.row is not None else 0
            self.stats.num_output_tokens += arrive(
                request,
                seq,
                tokens,
                rejects=run.num_drafts > 0 and run.has_drafts_after(accepted),
                step=launched.number,
                logprobs=logprobs,
            )
            changed[request.request_id] = request
        if seq.row is not None:  # not preempted meanwhile
            self._remember(run, accepted)
        if seq.finished:
            self._forget(seq)
            if request.finished:
                del self._requests[request.request_id]

    def _remember(self, run: Scheduled, accepted: list[int]) -> None:
        seq = run.seq
        if self._proposer is not None:
            self._proposer.finish(run, accepted)
        if self.config.prefix_caching:
            seq.pages.remember(seq.tokens, seq.num_computed)
            if seq.num_draft_computed:
                seq.pages.mark_drafted(min(seq.num_draft_computed, len(seq.tokens)))

    def _count(self, run: Scheduled, accepted: int, num_wanted: int) -> None:
        if run.num_drafts:
            deepest = max(run.depths)
            self.stats.speculative.count(
                run.num_drafts, accepted, self.limits.max_drafts, deepest=deepest
            )
        if run.decoding:
            self.adaptive.count(num_wanted, accepted, run.seq.draft_room)

    def _forget(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        if self._proposer is not None:
            self._proposer.forget(seq)
