"""Threads that share the masks of a step."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from anabranch.llm.grammar.mask_threads import MIN_ITEMS, MaskThreads


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_items", [0, 1, MIN_ITEMS, 3 * MIN_ITEMS, 100])
def test_every_item_is_done_once(num_threads: int, num_items: int) -> None:
    threads, done = MaskThreads(num_threads), list[int]()
    for _ in range(2):
        threads.run(done.append, range(num_items))
    assert Counter(done) == {item: 2 for item in range(num_items)}


def test_threads_work_beside_each_other() -> None:
    """No item ends before others have begun; alone, the first would wait for ever."""
    together = threading.Barrier(3, timeout=60)
    seen = set[int]()

    def work(item: int) -> None:
        seen.add(threading.get_ident())
        if item < 3:
            together.wait()

    MaskThreads(3).run(work, range(3 * MIN_ITEMS))
    assert len(seen) == 3 and threading.get_ident() in seen


@pytest.mark.parametrize("broken", range(2 * MIN_ITEMS))
def test_errors_are_raised(broken: int) -> None:
    def work(item: int) -> None:
        if item == broken:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=f"item {broken}"):
        MaskThreads(2).run(work, range(2 * MIN_ITEMS))
