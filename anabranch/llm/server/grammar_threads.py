"""Grammars compiled beside the steps of an engine. Large ones share a thread, small ones do not
wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from anabranch.llm.engine.engine import Engine
from anabranch.llm.grammar.grammar_compiler import CompiledGrammar
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.encoding_threads import lower_priority
from anabranch.llm.server.messages import Add

LARGE_CHARS = 8192
MAX_WAITING = 128
NUM_SMALL_THREADS = 2


class Compiled(NamedTuple):
    """A request whose grammar is ready, or why it is not."""

    add: Add
    grammar: CompiledGrammar | None
    error: Exception | None


class GrammarThreads:
    """Compiles for requests, and hands them back through `done`, from a thread."""

    def __init__(self, engine: Engine, done: Callable[[Compiled], None]) -> None:
        self._engine, self._done = engine, done
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, "grammar", initializer=lower_priority)
        self._large = ThreadPoolExecutor(1, "large-grammar", initializer=lower_priority)
        self._waiting: dict[str, Future[None]] = {}

    def submit(self, add: Add) -> None:
        """Compile the grammar of a request; ValueError where too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise ValueError("too many grammars wait to be compiled; try again")
        wanted = add.params.structured_outputs
        large = wanted is not None and len(wanted.text) > LARGE_CHARS
        pool = self._large if large else self._small
        self._waiting[add.request_id] = pool.submit(self._compile, add, add.params)

    def take(self, request_id: str) -> bool:
        """Whether a request was waiting, which it no longer is: it is ready, or aborted."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.cancel()
        return waiting is not None

    def _compile(self, add: Add, params: SamplingParams) -> None:
        try:
            self._done(Compiled(add, self._engine.compile_grammar(params), None))
        except Exception as error:  # of this request alone
            self._done(Compiled(add, None, error))
