"""Grammars made ready to match: checked, compiled within limits, and kept for the next request."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from anabranch.llm.grammar.grammar_source import grammar_source
from anabranch.llm.grammar.grammar_state import GrammarState
from anabranch.llm.grammar.schema_place import schema_place
from anabranch.llm.grammar.structured_outputs import StructuredOutputs

MAX_KEPT = 128  # grammars
MAX_KEPT_BYTES = 4 << 20  # of their texts together
# Of llguidance: a token's mask takes at most some 10 ms, else the request ends.
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

# Copies of a matcher share its lexer, which one thread at a time can use. Another matcher has its
# own, and learns the states of the text anew, which costs less than waiting. By the times of single
# masks, 64 sequences of an array of records on 12 threads take 1.8 ms a step with 16 lexers (99th
# percentile 6.5) and 1.1 with 64 (3.3).
LEXERS_A_CORE, MAX_LEXERS = 4, 64
MAX_REPEATED_BYTES = 16 << 10  # of a source; longer ones have one lexer, to save memory


class CompiledGrammar:
    """A grammar at its beginning, to be copied for every sequence."""

    def __init__(self, matcher: Any, make: Callable[[], Any], max_lexers: int) -> None:
        self._matchers = [matcher]
        self._users = [0]  # states that are alive, of each
        self._expected = 0  # sequences that will begin
        self._make, self._max_lexers = make, max_lexers
        self._lock = threading.RLock()  # a state may end while its thread has it

    def expect(self) -> None:
        """Have a lexer ready for one more sequence, if there may be another; on any thread."""
        with self._lock:
            self._expected += 1
            wanted = min(self._max_lexers, sum(self._users) + self._expected)
            missing = len(self._matchers) < wanted
        if missing:
            matcher = self._make()
            with self._lock:
                self._matchers.append(matcher)
                self._users.append(0)

    def begin(self) -> GrammarState:
        """A state of its own for a sequence, with the lexer that fewest use."""
        with self._lock:
            self._expected = max(self._expected - 1, 0)
            place = self._users.index(min(self._users))
            self._users[place] += 1
            matcher = self._matchers[place]
            state = GrammarState(matcher.deep_copy(), lexer=id(matcher))
        weakref.finalize(state, self._leave, place).atexit = False
        return state

    def _leave(self, place: int) -> None:
        with self._lock:
            self._users[place] -= 1


class GrammarCompiler:
    """Compiles for one tokenizer. May be called from any thread; the newest grammars are kept."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = sorted(eos_ids)
        self._max_lexers = min(len(os.sched_getaffinity(0)) * LEXERS_A_CORE, MAX_LEXERS)
        self._tokens: Any | None = None  # as llguidance has them; made for the first grammar
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._kept_bytes = 0

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """A grammar that was kept, or a new one; ValueError says what is wrong and where."""
        with self._lock:
            found = self._kept.get(wanted)
            if found is not None:
                self._kept.move_to_end(wanted)
        if found is None:
            found = self._compile(wanted)
            with self._lock:
                self._keep(wanted, found)
        found.expect()
        return found

    def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        try:
            source = grammar_source(wanted)
        except ValueError as error:
            raise ValueError(f"structured_outputs.{wanted.kind}: {error}") from None
        matcher = self._warm_matcher(source)
        if error := matcher.get_error():
            raise ValueError(f"structured_outputs.{wanted.kind}{self._reason(wanted, error)}")
        max_lexers = self._max_lexers if len(source) <= MAX_REPEATED_BYTES else 1
        return CompiledGrammar(matcher, lambda: self._warm_matcher(source), max_lexers)

    def _reason(self, wanted: StructuredOutputs, error: str) -> str:
        place = ""
        if wanted.kind == "json":
            place = schema_place(wanted.text, self._error_of)
        message = error.partition("<non-verbose/>")[0].strip()
        return f"{'.' + place if place else ''} cannot be compiled: {message[:1000]}"

    def _error_of(self, schema: str) -> str:
        return self._matcher(grammar_source(StructuredOutputs(json=schema))).get_error()

    def _warm_matcher(self, source: str) -> Any:
        """With its first mask made here, not in a step: it is by far the slowest."""
        matcher = self._matcher(source)
        if not matcher.get_error():
            matcher.compute_bitmask()
        return matcher

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

    def _keep(self, wanted: StructuredOutputs, made: CompiledGrammar) -> None:
        if wanted not in self._kept:
            self._kept_bytes += len(wanted.text)
        self._kept[wanted] = made
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            oldest, _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.text)
