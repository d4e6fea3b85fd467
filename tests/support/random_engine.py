"""An engine without a model: arbitrary tokens, through all that surrounds a model."""

from __future__ import annotations

import pickle
import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from anabranch.llm.engine.admission import Admission
from anabranch.llm.engine.limits import Limits
from anabranch.llm.engine.request import Request, arrive
from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler
from anabranch.llm.grammar.grammar_state import GrammarError
from anabranch.llm.grammar.token_rules import num_words
from anabranch.llm.sampling.batch import HostLogprobs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import sampled_entry
from anabranch.llm.sequences.page_pool import PagePool
from anabranch.llm.sequences.sequence import Sequence
from anabranch.llm.server.deltas import DeltaCursor, RequestDelta
from anabranch.llm.server.errors import RequestBroken, RequestRefused
from anabranch.llm.server.messages import Outputs, Ready, Snapshot


class RandomEngine:
    """As endpoints see an engine. Requests are checked and their texts made as in a real one."""

    num_restarts = 0
    trouble = None

    def __init__(self, tokenizer: Any, *, context: int, max_num_seqs: int = 8) -> None:
        vocab, page_size = len(tokenizer), 16
        self._rng = random.Random(0)
        self._vocab = vocab
        eos_ids = frozenset({tokenizer.eos_token_id})
        limits = Limits(context, max_num_seqs, 64, page_size, 64, 0)
        self._admission = Admission(
            tokenizer=tokenizer,
            vocab_size=vocab,
            eos_ids=eos_ids,
            limits=limits,
            pool=PagePool(limits.num_pages),
            prefix_caching=True,
            makes_drafts=False,
            seed=0,
            grammars=GrammarCompiler(tokenizer, vocab, eos_ids),
        )
        self.info = Ready(
            "random", tokenizer, vocab, context, max_num_seqs, limits.num_pages, page_size, 0, "cpu"
        )
        self.snapshot = Snapshot(EngineStats(), 0, 0, 0.0)

    async def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """Deltas as they come over a channel."""
        for request_id, prompt in prompts.items():
            try:
                request = self._admission.request(request_id, prompt, params)
            except ValueError as error:
                raise RequestRefused(str(error)) from error
            cursor, step = DeltaCursor(request), 0
            while not request.finished:
                try:
                    for seq in request.seqs:
                        self._extend(request, seq, step)
                except GrammarError as error:
                    raise RequestBroken(f"GrammarError: {error}") from error
                step += 1
                delta = cursor.delta()
                assert delta is not None
                for received in pickle.loads(pickle.dumps(Outputs([delta]))).deltas:
                    yield received

    def _extend(self, request: Request, seq: Sequence, step: int) -> None:
        if seq.finished:
            return
        params, token = seq.params, self._choose(seq)
        if step == 0 and seq.scores_prompt and params.prompt_logprobs is not None:
            seq.prompt_logprobs += [
                sampled_entry(
                    each, self._logprobs(params.prompt_logprobs), 0, params.prompt_logprobs
                )
                for each in seq.tokens[1:]
            ]
        wanted = params.logprobs
        logprobs = None if wanted is None else self._logprobs(wanted)
        arrive(request, seq, [token], rejects=False, step=step, logprobs=logprobs)

    def _choose(self, seq: Sequence) -> int:
        """Any token that the rules of a sequence allow."""
        if seq.rules is None:
            return self._rng.randrange(self._vocab)
        masks = np.full((1, num_words(self._vocab)), -1, np.int32)
        seq.rules.fill(masks, [], [])
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: self._vocab]
        return int(self._rng.choice(np.flatnonzero(bits)))

    def _logprobs(self, wanted: int) -> HostLogprobs:
        likely = self._rng.sample(range(self._vocab), min(wanted, self._vocab))
        values = -np.arange(1, len(likely) + 1, dtype=np.float32)
        return HostLogprobs(
            np.array([-3.5]), np.array([7]), np.array([likely], dtype=int), np.array([values])
        )
