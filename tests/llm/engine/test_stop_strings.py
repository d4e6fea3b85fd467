"""Stop strings by themselves, against a search for each of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from anabranch.llm.engine import text_stream
from anabranch.llm.engine.text_stream import START, StopStrings, TextStream

STRINGS = st.lists(st.text("ab<", min_size=1, max_size=6), max_size=6)


@given(st.text("ab<.", max_size=30), STRINGS)
def test_states_say_what_ends_and_what_begins(text: str, strings: list[str]) -> None:
    automaton, state = StopStrings(strings), START
    assert bool(automaton) == bool(strings)
    for end in range(1, len(text) + 1):
        before = text[:end]
        state = automaton.step(state, text[end - 1])
        ended = [string for string in strings if before.endswith(string)]
        begun = [
            size
            for string in strings
            for size in range(len(string))
            if before.endswith(string[:size])
        ]
        assert automaton.found(state) == max(map(len, ended), default=0)
        assert automaton.held(state) == max(begun, default=0)


class Words:
    """A tokenizer of these pieces, by number."""

    def __init__(self, pieces: list[str]) -> None:
        from tokenizers import Tokenizer, decoders, models

        vocab = {piece: number for number, piece in enumerate(pieces)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=pieces[0]))
        self.backend_tokenizer.decoder = decoders.Fuse()


PIECES = ["a", "b", "<", "ab", "<a", "b<ab", "ab<b", "bbb"]


@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=8), STRINGS.filter(bool), st.booleans())
def test_text_ends_in_the_same_place_however_it_is_cut_into_tokens(
    tokens: list[int], strings: list[str], include: bool
) -> None:
    text, stop = "".join(PIECES[token] for token in tokens), StopStrings(strings)
    by_piece = TextStream(Words(PIECES), stop=stop, include_stop=include)
    stopped = [by_piece.push(token) for token in tokens if by_piece.stopped_by is None]
    by_letter = TextStream(Words(PIECES), stop=stop, include_stop=include)
    for letter in text:
        if by_letter.push(PIECES.index(letter)):
            break
    assert (by_piece.text, by_piece.stopped_by) == (by_letter.text, by_letter.stopped_by)
    assert any(stopped) == any(string in text for string in strings)


def test_what_may_begin_a_stop_string_is_not_shown_yet() -> None:
    stream = TextStream(Words(PIECES), stop=StopStrings(["b<a", "<<"]))
    shown: list[tuple[str, str]] = []
    for token in (0, 1, 2, 1, 2, 2):
        stream.push(token)
        shown.append((stream.stable_text, stream.text))
    assert shown == [
        *(("a", "a"), ("a", "ab"), ("a", "ab<")),
        *(("ab<", "ab<b"), ("ab<", "ab<b<"), ("ab<b", "ab<b")),
    ]
    assert stream.stopped_by == "<<"


def test_a_stop_string_that_came_too_early_stays() -> None:
    """And one that began so early ends nothing that is read later."""
    stream = TextStream(Words(PIECES), stop=StopStrings(["ab"]))
    assert not stream.push(3, may_stop=False)
    assert not stream.push(0) and (stream.text, stream.stable_text) == ("aba", "ab")
    assert stream.push(1) and (stream.text, stream.stopped_by) == ("ab", "ab")
    without = TextStream(None)
    assert not without.push(0) and (without.text, without.stable_text) == ("", "")


def test_a_token_costs_the_same_with_any_number_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters looked at grow with the text and not with the strings."""
    steps: list[Any] = []
    step = StopStrings.step

    def counted(self: StopStrings, state: int, letter: str) -> int:
        steps.append(letter)
        return step(self, state, letter)

    stop = StopStrings([f"{number:x}~" for number in range(20_000)])
    stream = text_stream.TextStream(Words(PIECES), stop=stop)
    monkeypatch.setattr(StopStrings, "step", counted)
    for _ in range(100):
        stream.push(0)
        assert stream.stable_text.startswith("a") or len(stream.text) < 6
    assert len(steps) == 100
