"""Requests from an event loop: streams, cancellation, bad requests, an engine that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("transformers")

from tiny_models import GREEDY, as_on_gpu, assert_idle, one_by_one, random_prompts, tiny

from anabranch.llm.engine.async_llm import AsyncLLM, EngineDead
from anabranch.llm.engine.llm import LLM
from anabranch.llm.engine.request import Request, RequestOutput
from anabranch.llm.sampling.params import SamplingParams

PROMPTS = random_prompts()
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SECONDS = 60  # after which a test counts as hanging


@pytest.fixture(params=[False, True], ids=["in turn", "in flight"])
def llm(request: pytest.FixtureRequest) -> LLM:
    llm = tiny(max_num_seqs=4)
    return as_on_gpu(llm) if request.param else llm


@pytest.fixture
def served(llm: LLM) -> Iterator[AsyncLLM]:
    served = AsyncLLM(llm.engine)
    yield served
    served.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, SECONDS)

    return asyncio.run(bounded())


async def tokens_of(outputs: AsyncIterator[Any]) -> list[int]:
    tokens: list[int] = []
    async for found in outputs:
        new = found.outputs[0].token_ids
        assert new[: len(tokens)] == tokens
        tokens = new
    return tokens


async def settle(served: AsyncLLM, llm: LLM) -> None:
    while llm.engine.has_work or served._calls:
        await asyncio.sleep(0.001)


def test_streams_give_what_one_by_one_gives(llm: LLM, served: AsyncLLM) -> None:
    async def all_at_once() -> list[list[int]]:
        streams = [served.generate(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
        return list(await asyncio.gather(*map(tokens_of, streams)))

    found = run(all_at_once())
    served.close()
    assert_idle(llm)
    assert found == one_by_one(tiny(), PROMPTS)


def test_a_slow_reader_gets_the_newest(served: AsyncLLM, llm: LLM) -> None:
    async def slowly() -> list[int]:
        counts: list[int] = []
        async for found in served.generate("slow", PROMPTS[3], GREEDY):
            counts.append(len(found.outputs[0].token_ids))
            await settle(served, llm)
        return counts

    counts = run(slowly())
    assert counts[-1] == 24 and len(counts) <= 3


def test_leaving_the_loop_aborts(served: AsyncLLM, llm: LLM) -> None:
    async def leave() -> None:
        stream = served.generate("left", PROMPTS[3], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        await settle(served, llm)
        assert_idle(llm)
        assert await tokens_of(served.generate("left", PROMPTS[3], GREEDY))

    run(leave())


def test_cancelling_a_task_aborts(served: AsyncLLM, llm: LLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(tokens_of(served.generate("c", PROMPTS[3], LONG)))
        other = asyncio.create_task(tokens_of(served.generate("d", PROMPTS[4], GREEDY)))
        while not llm.engine.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await other) == 24
        await settle(served, llm)
        assert_idle(llm)

    run(cancel())


BAD: list[tuple[Any, Any, type[Exception]]] = [
    ([], GREEDY, ValueError),
    ([5, 1000], GREEDY, ValueError),
    ([5] * 300, GREEDY, ValueError),
    ("text", GREEDY, ValueError),
    (None, GREEDY, ValueError),
    ([5], None, ValueError),
    ([5], SamplingParams(logit_bias={500: 1.0}), ValueError),
]


def test_bad_requests_disturb_no_other(served: AsyncLLM, llm: LLM) -> None:
    async def mixed() -> list[Any]:
        streams = [served.generate(f"good {i}", p, GREEDY) for i, p in enumerate(PROMPTS)]
        streams[1:1] = [served.generate(f"bad {i}", *bad[:2]) for i, bad in enumerate(BAD)]
        streams.append(served.generate("good 0", PROMPTS[0], GREEDY))
        return await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)

    first, *rest, last = run(mixed())
    failed, good = rest[: len(BAD)], [first, *rest[len(BAD) :]]
    assert [type(error) for error in failed] == [kind for *_, kind in BAD]
    assert isinstance(last, ValueError) and "running already" in str(last)
    assert good == one_by_one(tiny(), PROMPTS)
    assert served.alive


@pytest.mark.parametrize("broken", ["launch", "land", "abort too"])
def test_a_failing_engine_ends_every_request(llm: LLM, broken: str) -> None:
    engine = llm.engine
    steps = 0
    step = engine.step

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    def third_fails() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            at = (engine, "_land") if broken == "land" else (engine._launcher, "launch")
            setattr(*at, fail)
            if broken == "abort too":
                engine.abort = fail  # type: ignore[method-assign]
        return step()

    engine.step = third_fails  # type: ignore[method-assign]
    served = AsyncLLM(engine)

    async def all_fail() -> list[Any]:
        streams = [served.generate(str(i), p, LONG) for i, p in enumerate(PROMPTS)]
        found = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        with pytest.raises(EngineDead, match="device is gone"):
            await tokens_of(served.generate("later", PROMPTS[0], GREEDY))
        return found

    found = run(all_fail())
    assert [type(error) for error in found] == [EngineDead] * len(PROMPTS)
    assert "device is gone" in str(found[0]) and not served.alive
    served.close()


def test_leaving_a_dead_engine_is_quiet(llm: LLM) -> None:
    served = AsyncLLM(llm.engine)

    async def leave() -> None:
        stream = served.generate("left", PROMPTS[3], LONG)
        async for _ in stream:
            break
        await asyncio.to_thread(served.close)
        await stream.aclose()

    run(leave())
    assert not served.alive


def test_closing_ends_open_requests(llm: LLM) -> None:
    served = AsyncLLM(llm.engine)

    async def close() -> None:
        stream = served.generate("open", PROMPTS[3], LONG)
        async for _ in stream:
            await asyncio.to_thread(served.close)
            break
        with pytest.raises(EngineDead, match="closed"):
            await tokens_of(stream)
        with pytest.raises(EngineDead, match="not running"):
            await tokens_of(served.generate("more", PROMPTS[3], LONG))

    run(close())
    served.close()


def test_a_reader_whose_loop_is_gone_does_not_stop_the_engine(served: AsyncLLM, llm: LLM) -> None:
    begun = threading.Event()
    lost: list[Any] = []

    async def begin() -> None:
        stream = served.generate("lost", PROMPTS[3], LONG)
        lost.append(stream)
        await anext(stream)
        begun.set()

    def loop_without_farewell() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin())
        loop.close()

    thread = threading.Thread(target=loop_without_farewell)
    thread.start()
    thread.join(SECONDS)
    assert begun.is_set()
    assert len(run(tokens_of(served.generate("next", PROMPTS[4], GREEDY)))) == 24
    assert served.alive
    with suppress(Exception):
        run(lost[0].aclose())


def test_an_output_that_cannot_be_made_ends_its_request(
    llm: LLM, served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Request.output

    def output_or_fail(request: Request) -> RequestOutput:
        if request.request_id == "bad":
            raise RuntimeError("no output")
        return output(request)

    async def both() -> list[Any]:
        streams = [served.generate(name, PROMPTS[3], GREEDY) for name in ("good", "bad")]
        return await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)

    monkeypatch.setattr(Request, "output", output_or_fail)
    good, bad = run(both())
    assert good == one_by_one(tiny(), PROMPTS[3:4])[0] and served.alive
    assert isinstance(bad, RuntimeError) and "no output" in str(bad)
    served.close()
    assert_idle(llm)
