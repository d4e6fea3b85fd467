"""Masks of many grammars at once are those of each alone."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from server_models import tiny_tokenizer

from anabranch.llm.grammar import mask_threads
from anabranch.llm.grammar.grammar_compiler import SEQUENCES_A_LEXER, GrammarCompiler
from anabranch.llm.grammar.grammar_state import GrammarState, Words
from anabranch.llm.grammar.mask_threads import MaskThreads
from anabranch.llm.grammar.structured_outputs import StructuredOutputs
from anabranch.llm.grammar.token_rules import num_words

FORMS = ({"json_object": True}, {"regex": "[a-z]{3,9}"}, {"choice": ("yes", "no", "never")})


def states_of(count: int) -> tuple[list[GrammarState], int]:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size, [tokenizer.eos_token_id])
    forms = [compiler.compile(StructuredOutputs(**form)) for form in FORMS]
    return [forms[place % len(forms)].begin() for place in range(count)], size


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
        assert threads.fill([(state, 1 + row) for row, state in enumerate(states)], words)
        np.testing.assert_array_equal(words[1:8], wanted)
        assert (words[[0, 8]] == -1).all()
        for state, row in zip(states, wanted, strict=True):
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            state.accept(int(bits.nonzero()[0][0]))


def test_one_mask_or_one_thread_is_left_to_the_caller() -> None:
    states, size = states_of(2)
    words = np.full((2, num_words(size)), -1, np.int32)
    assert not MaskThreads(4).fill([(states[0], 0)], words)
    assert not MaskThreads(1).fill([(states[0], 0), (states[1], 1)], words)
    assert (words == -1).all()


def test_states_with_one_lexer_stand_side_by_side() -> None:
    """Threads take neighbours, and states with the same lexer wait for each other."""
    (states, size), threads = states_of(12), MaskThreads(2)  # of three grammars in turn
    seen: list[int] = []

    class Executor:
        def unsafe_compute_mask_ptr(self, matchers: Any, *_: object) -> None:
            seen.extend(row for _, row in matchers)

    threads._executor = Executor()
    words = np.zeros((12, num_words(size)), np.int32)
    assert threads.fill([(state, row) for row, state in enumerate(states)], words)
    assert sorted(seen) == list(range(12))
    lexers = [states[row].lexer for row in seen]
    assert len(list(groupby(lexers))) == len(set(lexers)) == 3


def test_many_sequences_of_a_grammar_have_several_lexers() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler._max_lexers = 3
    grammar = compiler.compile(StructuredOutputs(**FORMS[1]))
    states = [grammar.begin() for _ in range(4 * SEQUENCES_A_LEXER)]
    lexers = [state.lexer for state in states]
    first, second, third, again = (lexers[i : i + SEQUENCES_A_LEXER] for i in range(0, 16, 4))
    assert [len(set(each)) for each in (first, second, third)] == [1, 1, 1]
    assert len({first[0], second[0], third[0]}) == 3
    assert again == first
    words = np.zeros((len(states), num_words(len(tokenizer))), np.int32)
    assert MaskThreads(2).fill([(state, row) for row, state in enumerate(states)], words)
    np.testing.assert_array_equal(words, alone(states, len(tokenizer)))


def test_after_a_slow_batch_masks_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of each is known, and who is too slow ends."""
    (states, size), threads = states_of(2), MaskThreads(2)
    words = np.full((2, num_words(size)), -1, np.int32)
    rows = [(state, row) for row, state in enumerate(states)]
    monkeypatch.setattr(mask_threads, "SLOW_SECONDS", -1.0)
    assert threads.fill(rows, words)
    assert [threads.fill(rows, words) for _ in range(mask_threads.ALONE_STEPS)].count(True) == 0
    assert threads.fill(rows, words)
