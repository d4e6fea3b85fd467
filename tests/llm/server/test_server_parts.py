"""Parts of the server by themselves: texts of tokens, joined deltas, limits."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
import weakref
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

import pytest

transformers = pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from server_models import talking_model, tiny_tokenizer  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402

from anabranch.llm.engine.async_llm import EngineDead  # noqa: E402
from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402
from anabranch.llm.server.answer import Answer  # noqa: E402
from anabranch.llm.server.app import make_app  # noqa: E402
from anabranch.llm.server.chat import ChatReply  # noqa: E402
from anabranch.llm.server.chat_models import ChatRequest, Message  # noqa: E402
from anabranch.llm.server.completion_models import (  # noqa: E402
    Completion,
    CompletionChoice,
    CompletionRequest,
)
from anabranch.llm.server.completions import CompletionReply  # noqa: E402
from anabranch.llm.server.deltas import (  # noqa: E402
    ChoiceDelta,
    DeltaCursor,
    DeltaListener,
    RequestDelta,
    join_deltas,
)
from anabranch.llm.server.errors import ApiError  # noqa: E402
from anabranch.llm.server.messages import (  # noqa: E402
    Channel,
    Outputs,
    Ready,
    ServedEngine,
)
from anabranch.llm.server.reply import TextEvents, event_of  # noqa: E402
from anabranch.llm.server.server_limits import (  # noqa: E402  # noqa: E402
    LARGE_ANSWER,
    LONG_CHARS,
    EncodingThreads,
    SequenceQuota,
    ServerLimits,
    WritingThread,
)
from anabranch.llm.server.service import Service, make_service  # noqa: E402
from anabranch.llm.server.token_texts import TokenStream, TokenTexts  # noqa: E402

TEXT = "hello the € and \U0001f30a\n\tá"


def piece_tokenizer() -> Any:
    """Pieces with a mark for spaces, and bytes for what has no piece."""
    pieces = ["<unk>", "</s>", "▁hello", "▁the", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    bpe = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_bytes_of_tokens_are_the_text() -> None:
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer(TEXT)["input_ids"]
    assert b"".join(texts.bytes_of(token) for token in ids).decode() == TEXT
    stream = TokenStream(texts)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == TEXT
    assert "€" in pieces  # whole, with the last of its three tokens
    assert texts.text_of(tokenizer.eos_token_id) == "<end>"
    assert texts.is_special(tokenizer.eos_token_id)


def test_pieces_with_marks_and_bytes() -> None:
    texts = TokenTexts(piece_tokenizer())
    ids = [2, 3, 4, 5 + 0xE2, 5 + 0x82, 5 + 0xAC]
    assert b"".join(texts.bytes_of(token) for token in ids).decode() == " hello thea€"
    assert texts.bytes_of(10_000) == b""  # a row of the logits without a token


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    texts = TokenTexts(None)
    assert (texts.bytes_of(3), texts.text_of(3), texts.decode([1, 2])) == (b"", "", "")


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_deltas_joined_are_the_output(at_once: int) -> None:
    """However many steps pass between two tellings."""
    llm = LLM(talking_model(), device="cpu", max_num_seqs=4, seed=0)
    params = SamplingParams(
        n=3, max_tokens=20, logprobs=2, prompt_logprobs=1, stop=["e"], temperature=1.5, seed=1
    )
    request = llm.engine.add_request("a", "hello the ", params)
    cursor = DeltaCursor(request)
    told: list[RequestDelta] = []
    for number, _ in enumerate(iter(lambda: llm.engine.has_work and llm.engine.step(), False), 1):
        if number % at_once == 0 or request.finished:
            told += pickle.loads(pickle.dumps(Outputs([cursor.delta()]))).deltas
    assert not any(delta.prompt_logprobs for delta in told[1:])
    whole = join_deltas(told)
    output = request.output()
    assert whole.finished
    assert whole.prompt_logprobs == output.prompt_logprobs
    for choice, expected in zip(whole.choices, output.outputs, strict=True):
        assert choice == (
            expected.index,
            expected.text,
            expected.token_ids,
            expected.origins,
            expected.steps,
            expected.logprobs,
            expected.finish_reason,
            expected.stop_reason,
        )


class Uncopied(list[int]):
    """Tokens that may be read once, and not copied into a longer list again and again."""

    def __add__(self, other: Any) -> Any:
        raise AssertionError("joined pairwise")

    __radd__ = __iadd__ = __add__


def test_joining_takes_linear_time() -> None:
    """Each token is copied once, not once for every delta after it."""
    deltas = [
        RequestDelta(
            "a",
            [ChoiceDelta(0, "x", Uncopied([i]), Uncopied([0]), Uncopied([i]), [], None, None)],
            False,
            0,
            None,
        )
        for i in range(50)
    ]
    joined = join_deltas(deltas).choices[0]
    assert (joined.token_ids, joined.text) == (list(range(50)), "x" * 50)

    async def read() -> list[RequestDelta]:
        listener = DeltaListener(["a"])
        for delta in deltas:  # the reader is slow
            listener.put(delta)
        return await listener.next()

    assert asyncio.run(read()) == [join_deltas(deltas)]


@pytest.mark.parametrize("text", ["", 'a"b\\', "\n\0\x1f\x7f", "€ \u2028 \U0001f30a", "[DONE]"])
def test_text_is_written_as_its_model_is(text: str) -> None:
    def chunk(index: int, text: str) -> Completion:
        choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
        return Completion(
            id="a", object="text_completion", created=1, model='m"', choices=[choice], usage=None
        )

    events = TextEvents()
    for index in (0, 12, 0):
        written, expected = events.event(index, text, chunk), event_of(chunk(index, text))
        assert (written[:6], written[-2:]) == (b"data: ", b"\n\n")
        assert b"\n" not in written[:-2]
        assert json.loads(written[6:]) == json.loads(expected[6:])


@pytest.mark.parametrize("path", ["completion", "chat"])
def test_a_reply_is_freed_with_its_last_reference(path: str) -> None:
    """Without waiting for the garbage collector: it holds the prompt, which may be large."""
    info = Ready("tiny", tiny_tokenizer(), 300, 64, 4, 16, 16, 0, "cpu")
    engine = cast("ServedEngine", SimpleNamespace(info=info, num_restarts=0))
    service = make_service(engine, limits=ServerLimits(), model_name=None, created=0)
    if path == "chat":
        turns = [Message(role="user", content="hello")]
        reply: Any = ChatReply(service, ChatRequest(messages=turns))
    else:
        reply = CompletionReply(service, CompletionRequest(prompt="hello"))
    gone = weakref.ref(reply)
    gc.disable()
    try:
        del reply
        assert gone() is None
    finally:
        gc.enable()


def test_large_answers_are_written_by_one_thread() -> None:
    release = threading.Event()

    async def check() -> None:
        writing, before = WritingThread(), set(threading.enumerate())
        calls = [lambda: release.wait(20), lambda: True]
        answers = [asyncio.ensure_future(writing.run(LARGE_ANSWER + 1, call)) for call in calls]
        await asyncio.sleep(0)  # both calls wait for a thread, or have one
        started = set(threading.enumerate()) - before
        release.set()
        assert await asyncio.gather(*answers) == [True, True]
        assert len(started) == 1

    asyncio.run(check())


def test_work_moves_to_a_thread_from_a_size_on() -> None:
    async def names(run: Any, most: int) -> list[str]:
        name = lambda: threading.current_thread().name.rpartition("_")[0]  # noqa: E731
        return [await run(size, name) for size in (1, most, most + 1)]

    writing, encoding = WritingThread(), EncodingThreads()
    assert asyncio.run(names(writing.run, LARGE_ANSWER)) == ["", "", "write-answers"]
    assert asyncio.run(names(encoding.run, LONG_CHARS)) == [*["encode-short"] * 2, "encode-long"]


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("x"), True), (EngineDead("KeyError"), False), (ApiError(400, "KeyError"), False)],
)
def test_errors_that_nobody_expects_leave_a_trace(
    error: Exception, told: bool, capsys: Any
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answer = Answer.__new__(Answer)
    asyncio.run(answer._end_stream(error, send))  # pyright: ignore[reportPrivateUsage]
    assert ("KeyError" in capsys.readouterr().err) == told and len(sent) == 1
    assert sent[0]["body"].startswith(b'data: {"error"')


def test_no_thread_of_a_channel_keeps_a_process() -> None:
    ours, theirs = Pipe()
    channel = Channel(ours, lambda _: None, lambda: None)
    threads = [each for each in threading.enumerate() if each.name.startswith("channel-")]
    assert len(threads) >= 2 and all(each.daemon for each in threads)
    theirs.close()
    channel.close()


def test_an_engine_in_trouble_refuses() -> None:
    info = Ready("tiny", tiny_tokenizer(), 300, 64, 4, 16, 16, 0, "cpu")
    engine = SimpleNamespace(info=info, num_restarts=0, trouble=None)
    limits = ServerLimits(max_queue=5, max_prompt_tokens=7)
    service = make_service(cast("Any", engine), limits=limits, model_name="m", created=0)
    service.check_engine()
    engine.trouble = "it hangs"
    with pytest.raises(ApiError, match="it hangs") as refused:
        service.check_engine()
    assert (refused.value.status_code, refused.value.code) == (503, "engine_failed")
    assert (service.model_name, service.admission.capacity) == ("m", 4 + 5)
    for name in (None, "m"):
        service.check_model(name)
    with pytest.raises(ApiError, match="there is no model 'tiny' here; the model is 'm'"):
        service.check_model("tiny")
    assert len(service.encoder.fitted([5] * 7, truncate=None, max_tokens=None)) == 7
    with pytest.raises(ApiError, match="has 8 tokens, the most is 7"):
        service.encoder.fitted([5] * 8, truncate=None, max_tokens=None)
    assert info.cache_tokens == 16 * 16


@pytest.mark.parametrize("origins", ["http://page.example", ["page.example"], ["http://a/b"]])
def test_origins_that_no_browser_sends_are_refused(origins: Any) -> None:
    service = cast("Service", SimpleNamespace(limits=ServerLimits()))
    with pytest.raises(ValueError, match="cors_origins"):
        make_app(service, cors_origins=origins)


def test_admission_counts_down_whatever_happens() -> None:
    admission = SequenceQuota(3)
    with admission.admit(2):
        with pytest.raises(ApiError) as full, admission.admit(2):
            pass
        assert full.value.status_code == 429
        with pytest.raises(KeyError), admission.admit(1):
            assert admission.num_open == 3
            raise KeyError
    assert admission.num_open == 0
    with pytest.raises(ApiError) as too_many, admission.admit(4):
        pass
    assert too_many.value.status_code == 400
    with admission.admit(3):
        assert admission.num_open == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"max_request_seconds": 0.0},
        {"max_request_seconds": float("inf")},
        {"header_seconds": 0.0},
        {"body_seconds": float("nan")},
        {"max_prompt_tokens": 0},
        {"max_connections": 0},
        {"max_prompt_logprobs": -1},
    ],
)
def test_limits_that_limit_nothing_are_refused(wrong: dict[str, Any]) -> None:
    least = {"max_queue": 0, "max_body_bytes": 1, "max_connections": 1, "max_prompt_logprobs": 0}
    times = dict.fromkeys(("max_request_seconds", "header_seconds", "body_seconds"), 0.5)
    ServerLimits(**least, **times, max_prompt_tokens=1)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServerLimits(**wrong)
