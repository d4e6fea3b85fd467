"""Tokens as they arrive: where they came from, what they add to the text, why they stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("transformers")

from test_scheduler import sequence
from test_stop_strings import PIECES, Words

from anabranch.llm.engine.request import arrive
from anabranch.llm.engine.text_stream import StopStrings, TextStream
from anabranch.llm.sampling.batch import HostLogprobs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.page_pool import PagePool
from anabranch.llm.sequences.sequence import Origin, Sequence

A, B, END = 0, 1, 2


def made(*, max_tokens: int = 9, **options: Any) -> tuple[Any, Sequence]:
    """A request for "a" and "b", which ends at "<" and at the stop string "bb"."""
    seq = sequence(PagePool(4), 3, tokens=max_tokens)
    seq.params = SamplingParams(**options)
    seq.stop_ids = frozenset({END})
    include = seq.params.include_stop_str_in_output
    stream = TextStream(Words(PIECES), stop=StopStrings(["bb"]), include_stop=include)
    return SimpleNamespace(texts=[stream], first_token=None, last_token=None), seq


def arrived(request: Any, seq: Sequence, tokens: list[int], **options: Any) -> int:
    given: dict[str, Any] = {"rejects": False, "step": 7, "logprobs": None} | options
    return arrive(cast("Any", request), seq, tokens, **given)


STOPS: list[tuple[dict[str, Any], list[int], int, str, str | None, int | str | None]] = [
    ({}, [A, B], 2, "ab", None, None),
    ({}, [A, END, A], 2, "a", "stop", None),
    ({"stop_token_ids": [END]}, [END], 1, "", "stop", END),
    ({"include_stop_str_in_output": True}, [A, END], 2, "a<", "stop", None),
    ({"skip_special_tokens": False}, [A, END], 2, "a<", "stop", None),
    ({}, [A, B, B, A], 3, "a", "stop", "bb"),
    ({"include_stop_str_in_output": True}, [A, B, B], 3, "abb", "stop", "bb"),
    ({"min_tokens": 2}, [END, A, END], 3, "<a", "stop", None),
    ({"min_tokens": 3}, [END, END, END], 3, "<<", "stop", None),
    ({"min_tokens": 3}, [B, B, A, B, B], 5, "bba", "stop", "bb"),
    ({"max_tokens": 2}, [A, A, A], 2, "aa", "length", None),
    ({"max_tokens": 2}, [A, END], 2, "a", "stop", None),
]


@pytest.mark.parametrize(("options", "tokens", "taken", "text", "reason", "by"), STOPS)
def test_why_a_sequence_ends(
    options: dict[str, Any],
    tokens: list[int],
    taken: int,
    text: str,
    reason: str | None,
    by: int | str | None,
) -> None:
    request, seq = made(**options)
    assert arrived(request, seq, tokens) == taken
    assert (seq.output, request.texts[0].text) == (tokens[:taken], text)
    assert (seq.finish_reason, seq.stop_reason) == (reason, by)
    assert seq.steps == [7] * taken


@pytest.mark.parametrize(("rejects", "last"), [(False, Origin.SAMPLED), (True, Origin.CORRECTED)])
def test_all_but_the_last_were_drafts(rejects: bool, last: Origin) -> None:
    request, seq = made()
    arrived(request, seq, [A, A, A], rejects=rejects)
    assert seq.origins == [Origin.ACCEPTED, Origin.ACCEPTED, last]
    first = request.first_token
    assert first is not None and request.last_token == first
    arrived(request, seq, [A])
    assert request.first_token == first <= request.last_token
    assert seq.origins[3:] == [Origin.SAMPLED]


@pytest.mark.parametrize("wanted", [None, 0, 1])
def test_logprobs_are_kept_if_they_are_wanted(wanted: int | None) -> None:
    request, seq = made(logprobs=wanted)
    top = np.array([[B], [A]])
    values = np.array([-2.0, -1.0], np.float32)
    given = HostLogprobs(values, np.array([2, 1]), top, np.array([[-0.5], [-1.0]], np.float32))
    arrived(request, seq, [A, A], logprobs=given)
    found = [{token: (item.logprob, item.rank) for token, item in e.items()} for e in seq.logprobs]
    if wanted is None:
        assert found == []
    else:
        likely = {B: (-0.5, 1)} if wanted else {}
        assert found == [likely | {A: (-2.0, 2)}, {A: (-1.0, 1)}]


def test_rules_may_be_over() -> None:
    request, seq = made()
    accepted: list[int] = []
    seq.rules = cast("Any", SimpleNamespace(accept=accepted.append, over=False))
    assert arrived(request, seq, [A, B]) == 2 and seq.finish_reason is None
    seq.rules = cast("Any", SimpleNamespace(accept=accepted.append, over=True))
    assert arrived(request, seq, [A, B]) == 1 and seq.finish_reason == "stop"
    assert accepted == [A, B, A]
