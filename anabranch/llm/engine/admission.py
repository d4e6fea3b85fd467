"""From what a user asks to a request with its sequences; what cannot be run is refused here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from anabranch.llm.engine.limits import Limits
from anabranch.llm.engine.prompts import Prompt, encode_prompt
from anabranch.llm.engine.request import Request
from anabranch.llm.engine.stop_strings import StopStrings
from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.grammar.bad_words import BadWords, bad_word_tokens
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar, GrammarCompiler
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.grammar.token_rules import TokenRules, token_mask
from anabranch.llm.sampling.noise import child_seed, fresh_seed
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.page_pool import PagePool, SequencePages
from anabranch.llm.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What every request of an engine is checked against and made with."""

    tokenizer: Any | None
    vocab_size: int
    eos_ids: frozenset[int]
    limits: Limits
    pool: PagePool
    prefix_caching: bool
    makes_drafts: bool
    seed: int | None  # of requests that give none
    grammars: GrammarCompiler

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Raises ValueError for what cannot be run."""
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"params must be SamplingParams, got {params!r:.80}")
        ids = encode_prompt(
            prompt,
            params,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=self.limits.max_model_len,
        )
        self._check(params)
        seed = params.seed if params.seed is not None else self.seed
        seed = fresh_seed() if seed is None else seed
        grammar = grammar or self.grammar(params)
        seqs = [self.sequence(request_id, i, ids, params, seed) for i in range(params.n)]
        if params.constrained:
            for seq in seqs:
                seq.rules = self._rules(params, grammar)
        stop = StopStrings(params.stop)
        texts = [self._text_stream(ids, params, stop) for _ in seqs]
        text = prompt if isinstance(prompt, str) else None
        return Request(request_id, text, ids, params, seqs, texts)

    def grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """Of a request, if it has one; `params` may not have been checked yet."""
        wanted: StructuredOutputs | None = getattr(params, "structured_outputs", None)
        return None if wanted is None else self.grammars.compile(wanted)

    def sequence(
        self, request_id: str, index: int, ids: list[int], params: SamplingParams, seed: int
    ) -> Sequence:
        """One of the n continuations of a prompt."""
        room = self.limits.max_model_len - len(ids)
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.eos_ids
        root = b"" if self.prefix_caching else secrets.token_bytes(16)
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
            speculates=self.makes_drafts and params.speculate is not False,
        )

    def _rules(self, params: SamplingParams, grammar: CompiledGrammar | None) -> TokenRules:
        """Which tokens may follow in a sequence of its own."""
        allowed, words = None, None
        if params.allowed_token_ids is not None:
            allowed = token_mask(params.allowed_token_ids, self.vocab_size)
        if params.bad_words:
            words = BadWords(bad_word_tokens(params.bad_words, self.tokenizer))
        return TokenRules(grammar.begin() if grammar else None, allowed, words)

    def _text_stream(self, ids: list[int], params: SamplingParams, stop: StopStrings) -> TextStream:
        return TextStream(
            self.tokenizer,
            prompt=ids,
            stop=stop,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
        )

    def _check(self, params: SamplingParams) -> None:
        ids = [*params.logit_bias, *params.stop_token_ids, *(params.allowed_token_ids or ())]
        wrong = next((token for token in ids if token >= self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: stop strings cannot be seen")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("this model has no tokenizer: bad_words cannot be seen")
        if params.speculate and not self.makes_drafts:
            raise ValueError(
                "speculate=True needs an engine with drafts: give LLM or EngineConfig "
                "speculative, such as SpeculativeConfig(method='ngram')"
            )
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is not None and wanted > self.vocab_size:
                raise ValueError(f"{name} {wanted} exceeds the vocabulary of {self.vocab_size}")
