"""Masks of a step stand at the rows of their sequences, whoever else is sampled beside them."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from anabranch.llm.engine.step_masks import MasksBegun, StepMasks
from anabranch.llm.grammar.mask_threads import MaskThreads

VOCAB = 40  # two words


def step_masks(runs: list[Any], batch: Any, drafted: Any = None, threads: Any = None) -> StepMasks:
    return MasksBegun(runs, batch, VOCAB, threads or MaskThreads(1)).finish(drafted)


class Rules:
    """Marks its masks with a number, and keeps what it was asked for."""

    state = None  # of a grammar that threads could fill

    def __init__(self, mark: int) -> None:
        self.mark = mark
        self.asked: list[Any] = []

    def leave_failed_lexer(self) -> None:
        if self.mark == 8:
            raise RuntimeError("no memory for another")

    def fill(self, masks: Any, drafts: Any, parents: Any, *, first_made: bool) -> None:
        assert not first_made
        self.asked = [list(drafts), list(parents)]
        for place in range(len(masks)):
            masks[place] = 100 * self.mark + place
        if self.mark == 9:
            raise RuntimeError("too slow")


def run(name: str, mark: int | None, drafts: list[int], *, finished: bool = False) -> Any:
    rules = None if mark is None else Rules(mark)
    seq = SimpleNamespace(rules=rules, finished=finished, drafts=drafts, request_id=name)
    parents = [place - 1 for place in range(len(drafts))]
    return SimpleNamespace(seq=seq, num_drafts=len(drafts), draft_parents=parents)


def batch_of(runs: list[Any], padded: bool) -> Any:
    numbers = [each.num_drafts for each in runs]
    return SimpleNamespace(
        num_drafts=numbers, max_drafts=max(numbers), rows=list(range(len(runs))), padded=padded
    )


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_several_sequences(padded: bool, on_device: bool) -> None:
    runs = [
        run("free", None, [7]),
        run("a", 1, [4, 5]),
        run("over", 2, [6], finished=True),
        run("b", 3, []),
        run("c", 4, [8]),
    ]
    drafted = np.zeros((5, 2), np.int64)
    for place, each in enumerate(runs):
        drafted[place, : each.num_drafts] = each.seq.drafts
        if on_device:
            each.seq.drafts = []  # only the device knows them
    brought = cast("Any", SimpleNamespace(wait=lambda: {"drafts": drafted})) if on_device else None
    masks, failed = step_masks(runs, batch_of(runs, padded), brought)
    assert masks is not None and not failed
    starts = [0, 3, 6, 9, 12] if padded else [0, 2, 5, 7, 8]
    expected = [(starts[1] + row, 100 + row) for row in range(3)]
    expected += [(starts[3], 300), (starts[4], 400), (starts[4] + 1, 401)]
    assert [(row, words[0]) for row, words in zip(masks.rows, masks.words, strict=True)] == expected
    assert masks.words.shape == (6, 2)
    assert [each.seq.rules.asked for each in runs if each.seq.rules and not each.seq.finished] == [
        [[4, 5], [-1, 0]],
        [[], []],
        [[8], [-1]],
    ]


@pytest.mark.parametrize("mark", [8, 9])
def test_a_grammar_that_fails_ends_its_request_alone(mark: int) -> None:
    runs = [run("bad", mark, [1]), run("good", 1, [])]
    masks, failed = step_masks(runs, batch_of(runs, padded=False))
    assert masks is not None and list(failed) == ["bad"]
    assert masks.words[2, 0] == 100


def test_nothing_is_made_where_nobody_has_rules() -> None:
    runs = [run("a", None, []), run("over", 1, [], finished=True)]
    made = step_masks(runs, batch_of(runs, padded=False))
    assert made == (None, {})


@pytest.mark.parametrize("raises", [False, True])
def test_masks_that_threads_make_are_kept(raises: bool) -> None:
    """Those of grammars that are over, and all of them where the threads fail, are made alone."""

    class Threads:
        pinned = False

        def start(self, states: Any, words: Any) -> Future[None]:
            under_way = Future[None]()
            for state, row in states:
                words[row] = state
            if raises:
                under_way.set_exception(ValueError("a buffer of the wrong size"))
            else:
                under_way.set_result(None)
            return under_way

    class Grammar(Rules):
        made = False

        def fill(self, masks: Any, drafts: Any, parents: Any, *, first_made: bool) -> None:
            self.made = first_made
            if not first_made:
                super().fill(masks, drafts, parents, first_made=False)

    runs = [run("a", 1, []), run("over", 2, []), run("b", 3, [])]
    for each, state in zip(runs, (7, None, 8), strict=True):
        each.seq.rules = Grammar(each.seq.rules.mark)
        each.seq.rules.state = state
    threads = cast("Any", Threads())
    masks, failed = step_masks(runs, batch_of(runs, padded=False), None, threads)
    assert masks is not None and not failed
    assert masks.words[:, 0].tolist() == ([100, 200, 300] if raises else [7, 200, 8])
    assert [each.seq.rules.made for each in runs] == [not raises, False, not raises]


def test_masks_are_made_one_by_one_where_threads_cannot_begin() -> None:
    class Threads:
        pinned = False

        def start(self, *_: Any) -> None:
            raise RuntimeError("can't start new thread")

    runs = [run("a", 1, []), run("b", 2, [])]
    masks, failed = step_masks(runs, batch_of(runs, padded=False), threads=Threads())
    assert masks is not None and not failed
    assert masks.words[:, 0].tolist() == [100, 200]
