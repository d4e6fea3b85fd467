"""Grammars made ready to match: checked, compiled within limits, and kept for the next request."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

from anabranch.llm.grammar.grammar_source import grammar_source
from anabranch.llm.grammar.grammar_state import GrammarState
from anabranch.llm.grammar.lexers import Lexers, Made
from anabranch.llm.grammar.low_priority import at_low_priority
from anabranch.llm.grammar.mask_threads import num_mask_threads
from anabranch.llm.grammar.schema_place import schema_place
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.grammar.token_rules import SLOW_SECONDS

MAX_KEPT = 128  # grammars
MAX_KEPT_BYTES = 4 << 20  # of their texts together
MAX_KEPT_LEXERS = 512  # of them together; one has 15 MB at most, but those of slow grammars
# Of llguidance: a token's mask takes at most some 10 ms, 120 of nested counts, else the request
# ends.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


# Tokens that llguidance decides about at once where a text takes all of them: blanks, and pieces of
# strings up to some lengths. More lengths than its own (10, 30) make masks of bounded strings
# cheaper, 97 to 79 us on average; tokens of a vocabulary of 128,000 take 0.25 s longer to read.
IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
LENGTHS = (2, 4, 6, 8, 10, 12, 16, 20, 30)
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{IN_STRINGS}{{1,{length}}}" for length in LENGTHS),
    f"{IN_STRINGS}+",
]

LEXERS_A_CORE, MAX_LEXERS = 4, 64  # of a grammar


class CompiledGrammar:
    """A grammar for the sequences of one request, for which lexers are reserved."""

    def __init__(self, lexers: Lexers, num_seqs: int, *, aside: bool) -> None:
        self._lexers = lexers
        self._reserved = lexers.reserve(num_seqs, aside=aside)

    def begin(self) -> GrammarState:
        """A state of its own for a sequence."""
        use = self._reserved.pop(0) if self._reserved else self._lexers.use()
        return GrammarState(self._lexers, use)


class GrammarCompiler:
    """Compiles for one tokenizer. May be called from any thread; the newest grammars are kept."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = sorted(eos_ids)
        self._max_lexers = most_lexers()
        self._tokens: Any | None = None  # as llguidance has them; made for the first grammar
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Lexers] = OrderedDict()
        self._kept_bytes = 0

    def prepare(self) -> None:
        """Read the vocabulary now, if that can be done: no thread runs Python for 0.5 s meanwhile.

        What is wrong is left for the first grammar to say.
        """
        with suppress(Exception):
            self._library_tokens()

    def compile(
        self, wanted: StructuredOutputs, num_seqs: int = 1, *, aside: bool = False
    ) -> CompiledGrammar:
        """For sequences of a request; ValueError says what is wrong with a grammar and where.

        With `aside` steps that run meanwhile come first.
        """
        with self._lock:
            lexers = self._kept.get(wanted)
        if lexers is None:
            lexers = self._lexers_of(wanted)
        grammar = CompiledGrammar(lexers, num_seqs, aside=aside)
        with self._lock:
            self._keep(wanted, lexers)
        return grammar

    def _lexers_of(self, wanted: StructuredOutputs) -> Lexers:
        try:
            source = grammar_source(wanted)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{wanted.kind}: {error}") from None

        def make(aside: bool) -> Made:
            # with its first mask, by far the slowest, which is then in no step
            made = self._made(source, aside=aside, begun=True)
            if error := made.matcher.get_error():
                reason = self._reason(wanted, error, aside)
                raise ValueError(f"structured_outputs.{wanted.kind}{reason}")
            if made.mask_seconds > SLOW_SECONDS:
                raise ValueError(
                    f"structured_outputs.{wanted.kind} is too slow: its first token takes "
                    f"{1e3 * made.mask_seconds:.0f} ms, the most is {1e3 * SLOW_SECONDS:.0f}"
                )
            return made

        return Lexers(make, self._max_lexers)

    def _reason(self, wanted: StructuredOutputs, error: str, aside: bool) -> str:
        place = ""
        if wanted.kind == "json":
            place = schema_place(wanted.text, partial(self._error_of, aside=aside))
        message = error.partition("<non-verbose/>")[0].strip()
        return f"{'.' + place if place else ''} cannot be compiled: {message[:1000]}"

    def _error_of(self, schema: str, *, aside: bool) -> str:
        source = grammar_source(StructuredOutputs(json=schema))
        return self._made(source, aside=aside, begun=False).matcher.get_error()

    def _made(self, source: str, *, aside: bool, begun: bool) -> Made:
        make = partial(_make_matcher, self._library_tokens(), source, begun=begun)
        return at_low_priority(make) if aside else make()

    def _library_tokens(self) -> Any:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._make_tokens()
            return self._tokens

    def _make_tokens(self) -> Any:
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            raise ValueError("structured_outputs: this model has no tokenizer")
        if not self._eos_ids:
            raise ValueError("structured_outputs: this model has no token that ends a text")
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(
            backend.to_str(),
            n_vocab=self._vocab_size,
            eos_token=list(self._eos_ids),
            slices=SLICES,
        )

    def _keep(self, wanted: StructuredOutputs, lexers: Lexers) -> None:
        if wanted not in self._kept:
            self._kept[wanted] = lexers
            self._kept_bytes += len(wanted.text)
        self._kept.move_to_end(wanted)
        while len(self._kept) > 1 and self._keeps_too_much():
            oldest, _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.text)

    def _keeps_too_much(self) -> bool:
        num_lexers = sum(map(len, self._kept.values()))
        too_many = len(self._kept) > MAX_KEPT or num_lexers > MAX_KEPT_LEXERS
        return too_many or self._kept_bytes > MAX_KEPT_BYTES


def _make_matcher(tokens: Any, source: str, *, begun: bool) -> Made:
    """A matcher, and its first mask if it is to be begun; neither holds Python's lock for long."""
    from llguidance import LLMatcher, LLParserLimits

    began = time.thread_time()
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    again = began
    if begun and not matcher.get_error():
        matcher.compute_bitmask()
        again = time.thread_time()
        # Slow once more: 1.5 ms for a list of records, then 0.03.
        matcher.deep_copy().compute_bitmask()
    now = time.thread_time()
    return Made(matcher, now - began, now - again if begun else 0.0)


def most_lexers() -> int:
    """Of a grammar. Two where masks are made one by one, since each learns states anew: 16 records
    with addresses of SmolLM2 take 0.71 ms a step with eight, 0.56 with two and 0.51 with one, with
    which all sequences of a grammar would end when one brings it to a bound.
    """
    if num_mask_threads() < 2:
        return 2
    return min(len(os.sched_getaffinity(0)) * LEXERS_A_CORE, MAX_LEXERS)
