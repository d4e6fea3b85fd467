"""Sequences of a grammar have lexers of their own, and those that failed serve nobody."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.llm.grammar.lexers import MAX_REPEATED_SECONDS, Lexers, LexerUse, Made


def quick(aside: bool) -> Made:
    return Made(object(), 0.0)


def distinct(uses: list[LexerUse]) -> int:
    return len({use.lexer for use in uses})


def test_each_sequence_has_its_own_until_there_are_enough() -> None:
    lexers = Lexers(quick, 3)
    uses = [*lexers.reserve(1), *lexers.reserve(4), lexers.use()]
    assert len(lexers) == distinct(uses[:3]) == 3
    assert [use.lexer.num_users for use in uses] == [2] * 6


def test_the_lexer_that_fewest_use_is_used_again() -> None:
    lexers = Lexers(quick, 3)
    uses = lexers.reserve(6)
    freed = uses.pop(1).lexer
    assert lexers.use().lexer is freed
    assert lexers.reserve(1)[0].lexer is freed


def test_a_request_that_never_begins_leaves_nothing_behind() -> None:
    lexers = Lexers(quick, 8)
    for _ in range(5):
        lexers.reserve(1)  # forgotten at once
    assert len(lexers) == 1
    assert lexers.reserve(1)[0].lexer.num_users == 1


def test_a_use_may_be_forgotten_by_the_thread_that_has_the_lock() -> None:
    """As the garbage collector may."""
    lexers = Lexers(quick, 2)
    uses = lexers.reserve(1)
    with lexers._lock:
        uses.clear()
    assert lexers.use().lexer.num_users == 1


def test_lexers_that_failed_are_replaced() -> None:
    lexers = Lexers(quick, 2)
    first, second = lexers.reserve(2)
    first.lexer.failed = True
    assert lexers.use().lexer is second.lexer
    third = lexers.reserve(1)[0].lexer
    assert third not in (first.lexer, second.lexer) and len(lexers) == 2
    second.lexer.failed = third.failed = True
    fourth = lexers.use().lexer
    assert not fourth.failed and len(lexers) == 1


def test_a_lexer_alone_is_replaced_too() -> None:
    lexers = Lexers(quick, 1)
    (first,) = lexers.reserve(1)
    first.lexer.failed = True
    assert not lexers.use().lexer.failed and len(lexers) == 1


def test_where_lexers_are_slow_to_make_there_is_one() -> None:
    """And none is made in a step."""
    lexers = Lexers(lambda aside: Made(object(), MAX_REPEATED_SECONDS + 1e-6), 8)
    uses = lexers.reserve(3)
    assert len(lexers) == distinct(uses) == 1
    uses[0].lexer.failed = True
    assert lexers.use().lexer is uses[0].lexer
    assert not lexers.reserve(1)[0].lexer.failed


def test_a_lexer_that_cannot_be_made_leaves_the_others() -> None:
    made: list[Any] = [quick(False), ValueError("no memory"), quick(False)]

    def make(aside: bool) -> Made:
        found = made.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    lexers = Lexers(make, 2)
    (first,) = lexers.reserve(1)
    with pytest.raises(ValueError, match="no memory"):
        lexers.reserve(1)
    assert lexers.use().lexer is first.lexer
    assert distinct([first, *lexers.reserve(1)]) == 2


def test_lexers_of_sequences_to_come_are_made_aside_and_those_of_a_step_are_not() -> None:
    given = list[bool]()

    def make(aside: bool) -> Made:
        given.append(aside)
        return quick(aside)

    lexers = Lexers(make, 2)
    (first,) = lexers.reserve(1, aside=True)
    first.lexer.failed = True
    uses = [lexers.use(), *lexers.reserve(1)]
    assert distinct(uses) == 2
    assert given == [True, False, False]
