"""Masks of many grammars at once are those of each alone."""

from __future__ import annotations

import os
from itertools import groupby
from threading import Event
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from server_models import tiny_tokenizer

from anabranch.llm.grammar import grammar_compiler, mask_threads
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler
from anabranch.llm.grammar.grammar_state import GrammarError, GrammarState, Words
from anabranch.llm.grammar.lexers import Made
from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.grammar.token_rules import TokenRules, num_words

FORMS = ({"json_object": True}, {"regex": "[a-z]{3,9}"}, {"choice": ("yes", "no", "never")})


def states_of(count: int) -> tuple[list[GrammarState], int]:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size, [tokenizer.eos_token_id])
    forms = [compiler.compile(StructuredOutputs(**form)) for form in FORMS]
    return [forms[place % len(forms)].begin() for place in range(count)], size


def fill(threads: MaskThreads, states: list[tuple[GrammarState, int]], words: Words) -> bool:
    """Whether threads wrote the masks."""
    under_way = threads.start(states, words)
    if under_way is not None:
        under_way.result()
    return under_way is not None


def alone(states: list[GrammarState], size: int) -> Words:
    words = np.zeros((len(states), num_words(size)), np.int32)
    for state, row in zip(states, words, strict=True):
        state.fill(row)
    return words


@pytest.mark.parametrize("num_threads", [2, 5])
def test_masks_of_many_are_those_of_each(num_threads: int) -> None:
    (states, size), threads = states_of(7), MaskThreads(num_threads)
    for _ in range(3):
        wanted = alone(states, size)
        words = np.full((9, num_words(size)), -1, np.int32)
        assert fill(threads, [(state, 1 + row) for row, state in enumerate(states)], words)
        np.testing.assert_array_equal(words[1:8], wanted)
        assert (words[[0, 8]] == -1).all()
        for state, row in zip(states, wanted, strict=True):
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            state.accept(int(bits.nonzero()[0][0]))


def test_one_mask_or_one_thread_is_left_to_the_caller() -> None:
    states, size = states_of(2)
    words = np.full((2, num_words(size)), -1, np.int32)
    assert not fill(MaskThreads(4), [(states[0], 0)], words)
    assert not fill(MaskThreads(1), [(states[0], 0), (states[1], 1)], words)
    assert (words == -1).all()


def test_states_with_one_lexer_stand_side_by_side() -> None:
    """Threads take neighbours, and states with the same lexer wait for each other."""
    (states, size), threads = states_of(12), MaskThreads(2)  # of three grammars in turn
    seen: list[int] = []

    class Executor:
        def unsafe_compute_mask_ptr(self, matchers: Any, *_: object) -> None:
            seen.extend(row for _, row in matchers)

    words = np.zeros((12, num_words(size)), np.int32)
    rows = [(state, row) for row, state in enumerate(states)]
    assert fill(threads, rows, words)
    threads._executor = Executor()
    assert fill(threads, rows, words)
    assert sorted(seen) == list(range(12))
    lexers = [states[row].lexer for row in seen]
    assert len(list(groupby(lexers))) == len(set(lexers)) == 3


def test_many_sequences_of_a_grammar_have_several_lexers() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler._max_lexers = 3
    form = StructuredOutputs(**FORMS[1])
    states = [compiler.compile(form).begin() for _ in range(4)]
    grammar = compiler.compile(form, 3)
    states += [grammar.begin() for _ in range(3)]
    lexers = [state.lexer for state in states]
    assert len(set(lexers[:3])) == 3
    assert lexers[3:] == [*lexers[:3], lexers[0]]
    assert len({grammar.begin().lexer for _ in range(9)}) == 1  # those that end at once
    del states[1]  # its lexer has the fewest users then
    assert compiler.compile(form).begin().lexer == lexers[1]
    words = np.zeros((len(states), num_words(len(tokenizer))), np.int32)
    assert fill(MaskThreads(2), [(state, row) for row, state in enumerate(states)], words)
    np.testing.assert_array_equal(words, alone(states, len(tokenizer)))


@pytest.mark.parametrize(("cores", "most"), [(1, 2), (2, 2), (3, 12), (16, 64), (99, 64)])
def test_a_grammar_has_two_lexers_where_masks_are_made_one_by_one(
    cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert grammar_compiler.most_lexers() == most
    assert (mask_threads.num_mask_threads() < 2) == (most == 2)


@pytest.mark.parametrize("aside", [False, True])
def test_a_grammar_whose_first_mask_stays_slow_is_refused(
    aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its states are known, too: each of its requests would hold up a step before it ends."""
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    made = Made(None, 0.0, mask_seconds=1.5 * grammar_compiler.SLOW_SECONDS)
    make = grammar_compiler._make_matcher
    monkeypatch.setattr(
        grammar_compiler,
        "_make_matcher",
        lambda *given, begun: made._replace(matcher=make(*given, begun=begun).matcher),
    )
    with pytest.raises(ValueError, match="regex is too slow: its first token takes 30 ms, the mos"):
        compiler.compile(StructuredOutputs(**FORMS[1]), aside=aside)
    assert not compiler._kept


def test_after_a_slow_batch_masks_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of each is known, and who is too slow ends."""
    (states, size), threads = states_of(2), MaskThreads(2)
    words = np.full((2, num_words(size)), -1, np.int32)
    rows = [(state, row) for row, state in enumerate(states)]
    monkeypatch.setattr(mask_threads, "SLOW_SECONDS", -1.0)
    assert fill(threads, rows, words)
    assert not any(fill(threads, rows, words) for _ in range(mask_threads.ALONE_STEPS))
    assert fill(threads, rows, words)


def test_requests_that_wait_to_begin_have_lexers_of_their_own() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler._max_lexers = 4
    form = StructuredOutputs(**FORMS[1])
    grammars = [compiler.compile(form), compiler.compile(form, 2)]
    states = [grammars[place].begin() for place in (0, 1, 1)]
    assert len({state.lexer for state in states}) == 3


def test_grammars_with_many_lexers_are_kept_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT_LEXERS", 4)
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler._max_lexers = 8
    one, two = (StructuredOutputs(**form) for form in FORMS[:2])
    compiler.compile(one)
    compiler.compile(two, 3)
    assert list(compiler._kept) == [one, two]
    compiler.compile(one)
    compiler.compile(two, 4)
    assert list(compiler._kept) == [two]
    compiler.compile(two, 6)  # the newest is kept, however many it has
    assert list(compiler._kept) == [two]
    assert compiler._kept_bytes == len(two.text)


def test_a_sequence_leaves_the_lexer_that_another_brought_to_a_bound() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = compiler.compile(StructuredOutputs(regex="ab?c"))
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab")
    rules = TokenRules(grammar.begin(), None, None)
    rules.accept(a)
    rules.accept_ahead(b)
    assert rules.state is not None
    first, size = rules.state.lexer, len(tokenizer)
    before = alone([rules.state], size)
    rules.leave_failed_lexer()
    assert rules.state.lexer is first
    first.failed = True
    rules.leave_failed_lexer()
    assert rules.state.lexer is not first
    np.testing.assert_array_equal(alone([rules.state], size), before)


def test_whoever_begins_masks_can_work_meanwhile() -> None:
    """Masks are under way when `start` returns, and take no token until they are there."""
    (states, size), threads = states_of(3), MaskThreads(2)
    words = np.zeros((3, num_words(size)), np.int32)
    rows = [(state, row) for row, state in enumerate(states)]
    assert fill(threads, rows, words)
    goes_on = Event()

    class Executor:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            assert goes_on.wait(60)

    threads._executor = Executor()
    under_way = threads.start(rows, words)
    assert under_way is not None and not under_way.done()
    assert not any(state.over for state in states)  # known without asking the library
    goes_on.set()
    under_way.result(60)


def test_a_token_taken_ahead_is_taken_once() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = compiler.compile(StructuredOutputs(regex="ab?c"))
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "abc")
    rules = TokenRules(grammar.begin(), None, None)
    rules.accept_ahead(a)
    rules.accept_ahead(a)  # the step could not be launched, the next one begins anew
    rules.accept(a)
    assert rules.num_valid([b, c]) == 2
    rules.accept_ahead(a)  # which cannot follow
    with pytest.raises(GrammarError, match="cannot go on"):
        rules.accept(a)
