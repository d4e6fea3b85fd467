"""Threads that share one LLM: their prompts join the same batches, and tokens stay the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from tiny_models import (
    GREEDY,
    as_on_gpu,
    assert_idle,
    one_by_one,
    pages,
    random_prompts,
    tiny,
    writing_source,
)

from anabranch.llm.engine.llm import LLM

NGRAM = {"method": "ngram", "min_ngram": 1, "adaptive": False}
PROMPTS = random_prompts(5)
PATIENCE = 120  # seconds until a thread counts as hung


def together(*calls: Callable[[], object]) -> None:
    """Run every call in a thread of its own; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def guarded(call: Callable[[], object]) -> None:
        barrier.wait(PATIENCE)
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight"])
@pytest.mark.parametrize(
    "options", [{}, {"speculative": NGRAM}, {"kv_cache_gib": pages(20)}], ids=repr
)
def test_threads_get_the_tokens_they_would_get_alone(
    options: dict[str, Any], like_gpu: bool
) -> None:
    llm = tiny(max_num_seqs=5, **options)
    llm = as_on_gpu(llm) if like_gpu else llm
    expected = one_by_one(tiny(), PROMPTS)
    found: dict[tuple[int, str], list[list[int]]] = {}

    def generate(first: int) -> None:
        mine = PROMPTS[first:] + PROMPTS[:first]
        answers = llm.generate(mine, GREEDY)
        rows = [answer.outputs[0].token_ids for answer in answers]
        found[first, "generate"] = rows[len(PROMPTS) - first :] + rows[: len(PROMPTS) - first]

    def stream(first: int) -> None:
        rows: list[list[int]] = []
        for prompt in PROMPTS:
            last: list[int] = []
            for output in llm.stream(prompt, GREEDY):
                now = output.outputs[0].token_ids
                assert now[: len(last)] == last
                last = now
            rows.append(last)
        found[first, "stream"] = rows

    together(
        *(lambda i=i: generate(i) for i in range(3)), *(lambda i=i: stream(i) for i in range(2))
    )
    assert len(found) == 5
    assert all(rows == expected for rows in found.values())
    assert_idle(llm)


def test_a_call_joins_the_batch_of_another() -> None:
    llm = tiny()
    answers: dict[str, Any] = {}

    def second() -> None:
        answers["second"] = llm.generate([PROMPTS[1]], GREEDY)

    thread = threading.Thread(target=second, daemon=True)

    def advance(num_tokens: int) -> None:
        if num_tokens == 3:
            thread.start()
            while llm.engine.num_waiting == 0:  # enters between two steps of this thread
                thread.join(0.01)

    answers["first"] = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=40), advance=advance)
    thread.join(PATIENCE)
    steps = {name: set(answer[0].outputs[0].steps) for name, answer in answers.items()}
    assert len(steps["second"]) == GREEDY.max_tokens and steps["second"] <= steps["first"]
    assert_idle(llm)


def test_a_callback_may_call_again() -> None:
    llm = tiny()
    alone = one_by_one(llm, PROMPTS[:2])
    inner: list[list[int]] = []

    def advance(num_tokens: int) -> None:
        if num_tokens == 3:
            inner.append(llm.generate([PROMPTS[1]], GREEDY)[0].outputs[0].token_ids)

    outer = llm.generate([PROMPTS[0]], GREEDY, advance=advance)[0].outputs[0].token_ids
    assert [outer, *inner] == alone


def test_a_stream_that_is_not_read_holds_up_nobody() -> None:
    llm = tiny()
    expected = one_by_one(llm, PROMPTS[:1])[0]
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=200))
    next(stream)
    together(*[lambda: llm.generate(PROMPTS, GREEDY)] * 2)
    assert next(stream).outputs[0].token_ids[: len(expected)] == expected
    stream.close()
    assert_idle(llm)


def test_an_error_of_a_step_reaches_the_waiting_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no device")

    def call() -> None:
        with pytest.raises(RuntimeError, match="no device"):
            llm.generate([PROMPTS[0]], GREEDY)

    monkeypatch.setattr(llm.engine._launcher._built.runner, "run", broken)
    together(call, call, call)


def test_a_refused_prompt_disturbs_no_other_thread() -> None:
    llm = tiny()
    expected = one_by_one(llm, PROMPTS)

    def refused() -> None:
        for _ in range(5):
            with pytest.raises(ValueError, match="not in the vocabulary"):
                llm.generate([[3, 4], [1000]], GREEDY)

    def answered() -> None:
        found = llm.generate(PROMPTS, GREEDY)
        assert [answer.outputs[0].token_ids for answer in found] == expected

    together(refused, answered, refused, answered)
    assert_idle(llm)


def test_threads_may_share_a_tokenizer() -> None:
    """Which refuses to be used by two at once while its settings change."""
    llm = LLM(writing_source(), device="cpu")
    message = [{"role": "user", "content": "Why do rivers meander? " * 20}]
    expected = llm.chat_prompt(message)

    def call() -> None:
        for _ in range(10):
            assert llm.chat_prompt(message) == expected
            llm.generate(["Once upon a time"], replace(GREEDY, max_tokens=2))

    together(*[call] * 4)
