"""Grammars made ready to match: checked, compiled within limits, and kept for the next request."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from typing import Any

from anabranch.llm.grammar.grammar_source import grammar_source
from anabranch.llm.grammar.grammar_state import GrammarState
from anabranch.llm.grammar.lexers import Lexers
from anabranch.llm.grammar.schema_place import schema_place
from anabranch.llm.grammar.structured_outputs import StructuredOutputs

MAX_KEPT = 128  # grammars
MAX_KEPT_BYTES = 4 << 20  # of their texts together
MAX_KEPT_LEXERS = 512  # of them together; one has 15 MB at most, but those of slow grammars
# Of llguidance: a token's mask takes at most some 10 ms, 120 of nested counts as (a{1000}){1000},
# else the request ends.
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

    def __init__(self, lexers: Lexers, num_seqs: int) -> None:
        self._lexers = lexers
        self._reserved = lexers.reserve(num_seqs)

    def begin(self) -> GrammarState:
        """A state of its own for a sequence."""
        use = self._reserved.pop(0) if self._reserved else self._lexers.use()
        return GrammarState(self._lexers, use)


class GrammarCompiler:
    """Compiles for one tokenizer. May be called from any thread; the newest grammars are kept."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = sorted(eos_ids)
        self._max_lexers = min(len(os.sched_getaffinity(0)) * LEXERS_A_CORE, MAX_LEXERS)
        self._tokens: Any | None = None  # as llguidance has them; made for the first grammar
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Lexers] = OrderedDict()
        self._kept_bytes = 0

    def compile(self, wanted: StructuredOutputs, num_seqs: int = 1) -> CompiledGrammar:
        """For sequences of a request; ValueError says what is wrong with a grammar and where."""
        with self._lock:
            lexers = self._kept.get(wanted)
        if lexers is None:
            lexers = self._lexers_of(wanted)
        grammar = CompiledGrammar(lexers, num_seqs)
        with self._lock:
            self._keep(wanted, lexers)
        return grammar

    def _lexers_of(self, wanted: StructuredOutputs) -> Lexers:
        try:
            source = grammar_source(wanted)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs.{wanted.kind}: {error}") from None
        self._library_tokens()  # made before a lexer is timed

        def make() -> Any:
            matcher = self._matcher(source)
            if not matcher.get_error():
                matcher.compute_bitmask()  # the first mask, by far the slowest, not in a step
            if error := matcher.get_error():
                raise ValueError(f"structured_outputs.{wanted.kind}{self._reason(wanted, error)}")
            return matcher

        return Lexers(make, self._max_lexers)

    def _reason(self, wanted: StructuredOutputs, error: str) -> str:
        place = ""
        if wanted.kind == "json":
            place = schema_place(wanted.text, self._error_of)
        message = error.partition("<non-verbose/>")[0].strip()
        return f"{'.' + place if place else ''} cannot be compiled: {message[:1000]}"

    def _error_of(self, schema: str) -> str:
        return self._matcher(grammar_source(StructuredOutputs(json=schema))).get_error()

    def _matcher(self, source: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        return LLMatcher(self._library_tokens(), source, log_level=0, limits=limits)

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
