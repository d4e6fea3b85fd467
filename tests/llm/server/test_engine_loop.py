"""The loop of the engine's process, driven in this one: messages in, deltas and reports out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
    pytest.importorskip(needed)

from server_models import engine_config  # noqa: E402

from anabranch.llm.engine.engine import Engine  # noqa: E402
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server import engine_child  # noqa: E402
from anabranch.llm.server.engine_child import (  # noqa: E402
    Compiled,
    EngineLoop,
    GrammarThreads,
    failed,
    ready,
    snapshot,
)
from anabranch.llm.server.messages import (  # noqa: E402
    Abort,
    Add,
    Broken,
    Outputs,
    Refused,
    Snapshot,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
DIGITS = SamplingParams(max_tokens=8, structured_outputs={"regex": "[0-9]{3}"})  # type: ignore[arg-type]


class Enough(Exception):
    """The loop has done what the test waits for."""


class Driven:
    """A loop whose messages are kept, and which ends when `enough` holds between two steps."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[Any] = []
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.enough: Callable[[], bool] = lambda: False
        channel = cast("Any", SimpleNamespace(send=self.sent.append))
        self.loop = EngineLoop(engine, channel, self.inbox, cast("Any", self))

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.enough():
            raise Enough
        yield

    def run(self, enough: Callable[[], bool], *messages: Any) -> None:
        for message in messages:
            self.inbox.put(message)
        self.enough = enough
        with pytest.raises(Enough):
            self.loop.run()

    def tokens(self, request_id: str) -> list[int]:
        found = [each for message in self.of(Outputs) for each in message.deltas]
        mine = [each for each in found if each.request_id == request_id]
        return [token for each in mine for choice in each.choices for token in choice.token_ids]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def is_over(self, request_id: str) -> bool:
        return any(
            each.request_id == request_id and each.finished
            for message in self.of(Outputs)
            for each in message.deltas
        )


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(engine_config(max_model_len=64))


@pytest.fixture
def driven(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Driven:
    monkeypatch.setattr(engine_child, "IDLE_SECONDS", 0.02)
    return Driven(engine)


def test_grammars_are_prepared_before_the_first_request(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds Python's lock for half a second, which streams would wait for."""
    waiting = list[int]()
    prepare = GrammarCompiler.prepare

    def noted(grammars: GrammarCompiler) -> None:
        waiting.append(driven.inbox.qsize())
        prepare(grammars)

    monkeypatch.setattr(GrammarCompiler, "prepare", noted)
    driven.run(lambda: driven.is_over("a"), Add("a", [5, 6], GREEDY))
    assert waiting == [1]


def test_requests_are_answered_side_by_side(driven: Driven) -> None:
    names = ["a", "b", "digits"]
    adds = [Add("a", [5, 6], GREEDY), Add("b", [5, 6], GREEDY), Add("digits", [5], DIGITS)]
    driven.run(lambda: all(map(driven.is_over, names)), *adds)
    assert driven.tokens("a") == driven.tokens("b")
    assert [len(driven.tokens(name)) for name in names] == [6, 6, 3]
    assert not driven.of(Refused) and not driven.of(Broken)


def test_what_cannot_be_run_is_refused_alone(driven: Driven) -> None:
    wrong = SamplingParams(structured_outputs={"regex": "("})  # type: ignore[arg-type]
    adds = [Add("ids", [10**6], GREEDY), Add("regex", [5], wrong), Add("good", [5], GREEDY)]
    driven.run(lambda: driven.is_over("good") and len(driven.of(Refused)) == 2, *adds)
    reasons = {each.request_id: each.reason for each in driven.of(Refused)}
    assert "vocabulary" in reasons["ids"] and "structured_outputs.regex" in reasons["regex"]
    assert not driven.of(Broken)


def test_an_error_ends_its_request_alone(
    driven: Driven, engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    add = engine.add_request

    def fails(request_id: str, *given: Any) -> Any:
        if request_id == "bad":
            raise KeyError("x")
        return add(request_id, *given)

    monkeypatch.setattr(engine, "add_request", fails)
    adds = [Add("bad", [5], GREEDY), Add("good", [5], GREEDY)]
    driven.run(lambda: driven.is_over("good"), *adds)
    assert driven.of(Broken) == [Broken("bad", "KeyError: 'x'")]
    assert "KeyError" in capfd.readouterr().err


def test_aborted_requests_send_nothing_more(driven: Driven, engine: Engine) -> None:
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    driven.run(lambda: bool(driven.tokens("gone")), Add("gone", [5], long))
    seen = driven.tokens("gone")
    driven.run(lambda: driven.is_over("later"), Abort("gone"), Add("later", [6], GREEDY))
    assert driven.tokens("gone") == seen
    assert not engine.has_work


def test_a_grammar_that_is_ready_too_late_is_dropped(driven: Driven, engine: Engine) -> None:
    add = Add("late", [5], DIGITS)
    driven.inbox.put(Compiled(add, engine.compile_grammar(DIGITS), None))  # nobody waits for it
    driven.run(lambda: driven.is_over("good"), Add("good", [5], GREEDY))
    assert not driven.tokens("late")


def test_reports_come_in_a_rhythm_and_when_work_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(engine_child, "time", clock)
    sent, busy = list[Any](), SimpleNamespace(has_work=False)
    for name in ("stats", "num_running", "num_waiting", "pool"):
        setattr(busy, name, getattr(engine, name))
    channel = cast("Any", SimpleNamespace(send=sent.append))
    loop = EngineLoop(cast("Any", busy), channel, SimpleQueue(), cast("Any", None))

    def reports(seconds: float, has_work: bool) -> int:
        now[0] += seconds
        busy.has_work = has_work
        sent.clear()
        loop._report()  # pyright: ignore[reportPrivateUsage]
        assert all(isinstance(each, Snapshot) for each in sent)
        return len(sent)

    assert reports(0, False) == 1  # the first
    assert reports(0.4375, False) == 0
    assert reports(0.0625, False) == 1  # half of the second that a message may stay away
    assert reports(0.15, True) == 0
    assert reports(0.1, True) == 1
    assert reports(0.01, False) == 1  # at once: nothing else would say so
    assert reports(0.01, False) == 0


def test_what_the_server_is_told(engine: Engine) -> None:
    said = ready(engine)
    limits = engine.limits
    assert (said.vocab_size, said.max_model_len) == (engine.vocab_size, limits.max_model_len)
    assert (said.max_num_seqs, said.max_drafts) == (limits.max_num_seqs, limits.max_drafts)
    assert said.cache_tokens == limits.num_pages * limits.page_size
    counts = snapshot(engine)
    assert counts.stats == engine.stats and counts.stats is not engine.stats
    assert (counts.num_running, counts.num_waiting, counts.cache_usage) == (0, 0, 0.0)


def test_settings_are_blamed_without_a_trace() -> None:
    def say(error: Exception, *, starting: bool) -> Any:
        try:
            raise error
        except Exception as caught:
            return failed(caught, starting=starting)

    assert say(ValueError("too small"), starting=True) == ("too small", "")
    assert say(MemoryError(), starting=True) == ("MemoryError", "")
    for error, starting in ((ValueError("x"), False), (KeyError("x"), True)):
        said = say(error, starting=starting)
        assert said.reason == f"{type(error).__name__}: {error}"
        assert "Traceback" in said.trace


def test_grammars_wait_up_to_a_bound_and_small_ones_pass_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_child, "MAX_WAITING", 2)
    monkeypatch.setattr(engine_child, "LARGE_CHARS", 10)
    held, done = threading.Event(), SimpleQueue[Compiled]()

    def compiled(params: SamplingParams) -> str:
        text = params.structured_outputs.text  # type: ignore[union-attr]
        if len(text) > 10:
            held.wait()
        return text

    engine = cast("Any", SimpleNamespace(compile_grammar=compiled))
    threads = GrammarThreads(engine, done.put)

    def add(name: str, pattern: str) -> Add:
        return Add(name, [5], SamplingParams(structured_outputs={"regex": pattern}))  # type: ignore[arg-type]

    threads.submit(add("large", "a" * 11))
    threads.submit(add("small", "a" * 10))
    with pytest.raises(ValueError, match="too many grammars wait"):
        threads.submit(add("one more", "a"))
    assert done.get().add.request_id == "small"
    assert threads.take("small") and not threads.take("small")
    threads.submit(add("one more", "a"))
    assert done.get().add.request_id == "one more"
    held.set()
    assert done.get().grammar == "a" * 11
    assert threads.take("large")
