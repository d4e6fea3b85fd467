"""The engine: requests in, a step at a time, tokens out.

A step is scheduled, launched and, a step later, finished: while the GPU computes one step the host
finishes the one before it. Drafts depend on the tokens before them, so with drafts a step is
finished before the next is scheduled.
"""

from __future__ import annotations

import secrets
import time

from anabranch.cache.page_pool import PagePool
from anabranch.cache.sequence_pages import SequencePages
from anabranch.engine.arrivals import arrive
from anabranch.engine.build import Built, build, eos_ids, vocab_size
from anabranch.engine.config import EngineConfig
from anabranch.engine.launch import Asked, Launched, Launcher
from anabranch.engine.layout import short_first
from anabranch.engine.prompts import Prompt, encode_prompt
from anabranch.engine.request import Request
from anabranch.engine.runner import Progress
from anabranch.engine.sample_output import HostLogprobs
from anabranch.engine.sample_random import child_seed, fresh_seed
from anabranch.engine.sampler import Sampler
from anabranch.engine.sampling_params import SamplingParams
from anabranch.engine.scheduler import Scheduled, Scheduler
from anabranch.engine.sequence import Sequence
from anabranch.engine.stats import EngineStats
from anabranch.engine.text_stream import TextStream
from anabranch.speculative.adaptive import AdaptiveDrafts
from anabranch.speculative.draft_model import DraftProposer
from anabranch.speculative.ngram import NgramProposer
from anabranch.speculative.proposer import Proposer


class Engine:
    """Continuous batching over one model. Not thread-safe: one caller at a time."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        built = build(config, progress)
        self.config = config
        self.limits = built.limits
        self.device = built.device
        self.model_name = built.target.name
        self.tokenizer = built.target.tokenizer
        self.model_config = built.target.config
        self.vocab_size = vocab_size(built.target)
        self.eos_ids = eos_ids(built)
        self.stats = EngineStats()
        self.pool = PagePool(built.limits.num_pages)
        self.scheduler = Scheduler(self.pool, self.limits.max_num_seqs, self.limits.max_num_tokens)
        sampler = Sampler(built.rows, self.device)
        self._proposer = _make_proposer(config, built)
        self.adaptive = AdaptiveDrafts(
            built.limits.max_drafts,
            enabled=config.speculative is not None and config.speculative.adaptive,
        )
        self._launcher = Launcher(built, sampler, self._proposer, self.eos_ids)
        self._requests: dict[str, Request] = {}
        self._pipelined = self.device.type == "cuda"
        self._pads = len(built.runner.graphs) > 0  # graphs hold equally many tokens of all
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

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request; a bad one is refused here and disturbs no other."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is running already")
        ids = encode_prompt(
            prompt,
            params,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.limits.max_model_len,
        )
        self._check(params)
        seed = params.seed if params.seed is not None else self.config.seed
        seed = fresh_seed() if seed is None else seed
        seqs = [self._sequence(request_id, i, ids, params, seed) for i in range(params.n)]
        texts = [
            TextStream(
                self.tokenizer,
                prompt=ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
            )
            for _ in seqs
        ]
        text = prompt if isinstance(prompt, str) else None
        request = Request(request_id, text, ids, params, seqs, texts)
        self._requests[request_id] = request
        for seq in seqs:
            self.scheduler.add(seq)
        return request

    def _check(self, params: SamplingParams) -> None:
        ids = [*params.logit_bias, *params.stop_token_ids]
        wrong = next((token for token in ids if token >= self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop strings cannot be seen")
        if params.speculate and self._proposer is None:
            raise ValueError(
                "speculate=True needs an engine with drafts: give LLM or EngineConfig "
                "speculative, such as SpeculativeConfig(method='ngram')"
            )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.vocab_size:
                raise ValueError(f"{name} {wanted} exceeds the vocabulary of {self.vocab_size}")

    def _sequence(
        self, request_id: str, index: int, ids: list[int], params: SamplingParams, seed: int
    ) -> Sequence:
        room = self.limits.max_model_len - len(ids)
        speculates = self._proposer is not None and params.speculate is not False
        root = b"d" if speculates and self._proposer and self._proposer.on_device else b""
        if not self.config.prefix_caching:
            root = secrets.token_bytes(16)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        return Sequence(
            request_id=request_id,
            index=index,
            params=params,
            prompt_len=len(ids),
            tokens=list(ids),
            pages=SequencePages(self.pool, self.limits.page_size, root),
            seed=child_seed(seed, index),
            max_tokens=min(params.max_tokens or room, room),
            stop_ids=frozenset(stop_ids),
            speculates=speculates,
        )

    def abort(self, request_id: str) -> Request | None:
        """End a request now; its pages are free for the next step."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for seq in request.seqs:
            if not seq.finished:
                seq.finish_reason = "abort"
                self._forget(seq)
        return request

    def step(self) -> list[Request]:
        """Run one step; the requests that have new tokens or are over."""
        changed: list[Request] = []
        began, batch = time.perf_counter(), len(self.scheduler.running)
        num_drafts = self._choose_drafts()
        asked = Asked(began, batch, num_drafts)
        if self._flying and (num_drafts or self._flying.has_drafts):
            changed += self._land()
        self._draft_on_host(num_drafts)
        step = short_first(self.scheduler.schedule())
        if self._pads and any(run.num_drafts for run in step):
            step = self.scheduler.pad(step, 1 + self.limits.max_drafts)
        launched = self._launcher.launch(step, self.stats.num_steps, asked) if step else None
        self.stats.num_steps += launched is not None
        self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.num_cached_tokens = self.scheduler.num_cached_tokens
        if self._flying:
            changed += self._land()
        self._flying = launched
        if launched and not self._pipelined:
            changed += self._land()
        return changed

    def _choose_drafts(self) -> int:
        """How many drafts each sequence that is decoding should get at most."""
        ready = any(seq.speculates and seq.decoding for seq in self.scheduler.running)
        if self._proposer is None or not ready:
            return 0
        return self.adaptive.choose(len(self.scheduler.running))

    def _draft_on_host(self, num_drafts: int) -> None:
        for seq in self.scheduler.running:
            seq.drafts, seq.num_drafts = [], 0
        if self._proposer is None or not num_drafts:
            return
        ready = [seq for seq in self.scheduler.running if seq.speculates and seq.decoding]
        start = time.perf_counter()
        self._proposer.prepare(ready, num_drafts)
        if not self._proposer.on_device:
            self.stats.add_times({"proposal": 1e3 * (time.perf_counter() - start)})
        for seq in ready:
            seq.num_drafts = min(seq.num_drafts, _room(seq))

    def _land(self) -> list[Request]:
        """Take in the results of the step in flight."""
        launched, self._flying = self._flying, None
        assert launched is not None
        samples = launched.samples.wait() if launched.samples else None
        times = launched.clock.read()
        now = time.perf_counter()
        self.stats.add_times(times)
        self.stats.num_graph_steps += launched.graphed
        changed: dict[str, Request] = {}
        place = 0
        for run in launched.step:
            self.stats.num_prompt_tokens += 0 if run.decoding else run.num_known
            if run.samples and samples is not None:
                tokens = samples.tokens[place]
                logprobs = samples.logprobs[place] if samples.logprobs else None
                self._land_run(run, tokens, logprobs, launched, changed)
                place += 1
            elif not run.seq.finished:
                self._land_chunk(run, launched)
        if self._proposer is not None and all(run.decoding for run in launched.step):
            asked = launched.asked
            began = max(asked.at, self._landed_at)  # what the host did in between counts
            self.adaptive.observe(asked.batch, asked.num_drafts, 1e3 * (now - began))
        self._landed_at = now
        return list(changed.values())

    def _land_run(
        self,
        run: Scheduled,
        tokens: list[int],
        logprobs: HostLogprobs | None,
        launched: Launched,
        changed: dict[str, Request],
    ) -> None:
        seq = run.seq
        seq.num_pending -= 1
        if seq.finished:
            return  # aborted, or stopped while this step was in flight
        request = self._requests[seq.request_id]
        accepted = len(tokens) - 1
        self._count(run, accepted, launched.asked.num_drafts)
        if seq.row is not None:  # not preempted meanwhile
            seq.num_computed += accepted
        self._land_prompt(run, launched)
        added = arrive(
            request,
            seq,
            tokens,
            num_drafted=run.num_drafts,
            step=launched.number,
            logprobs=logprobs,
        )
        self.stats.num_output_tokens += added
        if seq.row is not None:
            self._remember(run, accepted)
        changed[request.request_id] = request
        if seq.finished:
            self._forget(seq)
            if request.finished:
                del self._requests[request.request_id]

    def _land_chunk(self, run: Scheduled, launched: Launched) -> None:
        """A part of a prompt was computed."""
        self._land_prompt(run, launched)
        if run.seq.row is not None:
            self._remember(run, 0)

    def _land_prompt(self, run: Scheduled, launched: Launched) -> None:
        """Keep logprobs of a prompt's tokens by position: a preempted prompt is run again."""
        if run in launched.prompts:
            entries = launched.prompts[run].wait()
            run.seq.prompt_logprobs[run.start : run.start + len(entries)] = entries

    def _remember(self, run: Scheduled, num_accepted: int) -> None:
        seq, computed = run.seq, run.seq.num_computed
        if self._proposer is not None:
            self._proposer.finish(run, num_accepted)
            if seq.speculates and self._proposer.on_device:
                computed = min(computed, seq.num_draft_computed)
        if self.config.prefix_caching:
            seq.pages.remember(seq.tokens, computed)

    def _count(self, run: Scheduled, accepted: int, asked: int) -> None:
        if run.num_drafts:
            self.stats.speculative.count(run.num_drafts, accepted, self.limits.max_drafts)
        if run.decoding and run.seq.speculates:
            self.adaptive.count(min(asked, _room(run.seq)), accepted)

    def _forget(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        if self._proposer is not None:
            self._proposer.forget(seq)


def _room(seq: Sequence) -> int:
    """Drafts a sequence may have: the token behind the last one is one more."""
    return seq.max_tokens - seq.num_output - 1


def _make_proposer(config: EngineConfig, built: Built) -> Proposer | None:
    speculative = config.speculative
    if speculative is None:
        return None
    if built.draft is None:
        return NgramProposer(speculative.min_ngram, speculative.max_ngram)
    budget = built.limits.max_num_tokens + built.limits.max_num_seqs
    return DraftProposer(built.draft, budget)
