"""Long prompts are refused before they are tokenized in full, and never delay short ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")
for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed)

from tokenizer_families import FAMILIES, WORDS, tokenizer_of  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from anabranch.llm.server.errors import ApiError  # noqa: E402
from anabranch.llm.server.server_limits import (  # noqa: E402
    LONG_CHARS,
    MAX_WAITING_CHARS,
    EncodingThreads,
)
from anabranch.llm.server.token_texts import PIECE_CHARS, PromptEncoder  # noqa: E402

LIMIT, VOCAB = 200, 10**6


class Spy:
    """A tokenizer that counts the characters it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._backend = tokenizer, tokenizer.backend_tokenizer
        self.backend_tokenizer = self
        self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend if hasattr(self._backend, name) else self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._tokenizer(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


def encoder_of(tokenizer: Any, limit: int = LIMIT) -> PromptEncoder:
    return PromptEncoder(
        tokenizer, vocab_size=VOCAB, max_model_len=limit + 1, max_prompt_tokens=limit
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_is_too_long_is_not_tokenized_in_full(family: str) -> None:
    spy = Spy(tokenizer_of(family))
    encoder = encoder_of(spy)
    text = " ".join(WORDS * 20_000)  # a megabyte
    with pytest.raises(ApiError, match="shorten") as refused:
        encoder.text(text)
    assert (refused.value.status_code, refused.value.code) == (400, "context_length_exceeded")
    assert spy.num_chars <= PIECE_CHARS < len(text) / 20
    spy.num_chars = 0
    with pytest.raises(ApiError, match="bytes"):
        encoder.refuse_by_bytes([text], "prompt")
    assert not spy.num_chars


def test_a_tokenizer_that_cuts_and_pads_is_told_not_to() -> None:
    tokenizer = tokenizer_of(next(iter(FAMILIES)))
    text = " ".join(WORDS)
    wanted = encoder_of(tokenizer).text(text)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=LIMIT)
    assert encoder_of(tokenizer).text(text) == wanted
    assert 3 < len(wanted) < LIMIT


def test_without_a_tokenizer_prompts_are_tokens() -> None:
    encoder = encoder_of(None)
    assert encoder.fitted([1, 2], truncate=None, max_tokens=None) == [1, 2]
    with pytest.raises(ApiError, match="no tokenizer"):
        encoder.text("hello")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_tokenizers_own(family: str) -> None:
    tokenizer = tokenizer_of(family)
    encoder = encoder_of(tokenizer)
    for text in ("hello the river", "€ \U0001f30a ﬁ", "", "<user>the<end>", "ll" * 50):
        for special in (True, False):
            expected = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert encoder.text(text, special=special) == expected


def test_a_long_text_of_few_tokens_is_tokenized() -> None:
    """Length alone does not decide: a word that is unknown is one token however long it is."""
    encoder = encoder_of(tokenizer_of("word-piece"))
    assert len(encoder.text("the " + "x" * 10 * PIECE_CHARS)) == 2


def refuses(tokenizer: Any, text: str, limit: int) -> bool:
    try:
        encoder_of(tokenizer, limit).text(text)
    except ApiError:
        return True
    return False


def test_short_texts_are_tokenized_at_once() -> None:
    """Up to a piece, or eight characters for each token that fits."""
    tokenizer = tokenizer_of("byte-level")
    for limit, most in ((LIMIT, PIECE_CHARS), (PIECE_CHARS // 4, 2 * PIECE_CHARS)):
        assert [refuses(tokenizer, "~" * size, limit) for size in (most, most + 1)] == [False, True]


def test_pieces_may_have_some_tokens_more_than_the_whole() -> None:
    """Sixty-four each, which a cut may add."""
    tokenizer = tokenizer_of("byte-level")
    text = "<assistant>" * 4000
    pieces = [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
    assert len(pieces) == 2
    surely = sum(len(tokenizer(piece)["input_ids"]) - 64 for piece in pieces)
    assert not refuses(tokenizer, text, surely)
    assert refuses(tokenizer, text, surely - 1)


def test_a_long_text_that_is_to_be_truncated_is_tokenized() -> None:
    text = " ".join(WORDS * 1000)
    tokenizer = tokenizer_of("byte-level")
    ids = encoder_of(tokenizer).text(text, unlimited=True)
    assert ids == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("family", ["byte-level", "byte-fallback"])
@given(st.lists(st.sampled_from([*WORDS, "hello", " the", "  ", "ll", "€", "각", "\n"])))
def test_no_text_that_fits_is_refused_by_its_bytes(family: str, words: list[str]) -> None:
    text, tokenizer = "".join(words), TOKENIZERS[family]
    num_tokens = len(tokenizer(text)["input_ids"])
    encoder_of(tokenizer, max(num_tokens, 1)).refuse_by_bytes([text], "prompt")


TOKENIZERS = {family: tokenizer_of(family) for family in ("byte-level", "byte-fallback")}


def test_texts_of_the_longest_tokens_fit() -> None:
    encoder = encoder_of(TOKENIZERS["byte-level"])
    text = "<assistant>" * LIMIT
    encoder.refuse_by_bytes([text], "prompt")
    assert len(encoder.text(text)) == LIMIT


def test_special_tokens_are_not_counted_with_every_piece() -> None:
    tokenizer = tokenizer_of("byte-level")
    many = TemplateProcessing(single="<user> " * 100 + "$0", special_tokens=[("<user>", 1)])
    tokenizer.backend_tokenizer.post_processor = many
    num_tokens = PIECE_CHARS // len("<assistant>") + 10  # two pieces
    encoder = encoder_of(tokenizer, num_tokens)
    assert len(encoder.text("<assistant>" * num_tokens, special=False)) == num_tokens


def test_all_parts_of_a_conversation_count() -> None:
    encoder = encoder_of(TOKENIZERS["byte-level"])
    half = "a" * (encoder.max_prompt_bytes // 2 + 1)
    encoder.refuse_by_bytes([half], "messages")
    with pytest.raises(ApiError, match="bytes") as refused:
        encoder.refuse_by_bytes([half, half], "messages")
    assert refused.value.param == "messages"
    with pytest.raises(ApiError, match="bytes"):
        encoder.refuse_by_bytes(["€" * (encoder.max_prompt_bytes // 3 + 1)], "prompt")


def test_the_longest_prompts() -> None:
    encoder = encoder_of(TOKENIZERS["byte-level"])
    encoder.refuse_by_bytes(["a" * encoder.max_prompt_bytes], "prompt")
    with pytest.raises(ApiError, match="bytes"):
        encoder.refuse_by_bytes(["a" * encoder.max_prompt_bytes, "a"], "prompt")
    longest, more = [5] * LIMIT, [6, *[5] * LIMIT]
    assert encoder.fitted(longest, truncate=None, max_tokens=1) == longest
    assert encoder.fitted(more, truncate=LIMIT, max_tokens=None) == longest
    with pytest.raises(ApiError, match=f"has {LIMIT + 1} tokens, the most is {LIMIT}"):
        encoder.fitted(more, truncate=None, max_tokens=None)
    with pytest.raises(ApiError, match="ask for at most 1"):
        encoder.fitted(longest, truncate=None, max_tokens=2)
    assert encoder.fitted([VOCAB - 1], truncate=None, max_tokens=None) == [VOCAB - 1]
    with pytest.raises(ApiError, match=f"token id {VOCAB} is not in the vocabulary of {VOCAB}"):
        encoder.fitted([3, VOCAB, 4], truncate=None, max_tokens=None)


def in_loop(call: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await call()

    return asyncio.run(bounded())


def test_a_long_text_does_not_hold_up_a_short_one() -> None:
    release = threading.Event()

    async def check() -> None:
        threads, before = EncodingThreads(), set(threading.enumerate())
        long = [
            asyncio.ensure_future(threads.run(LONG_CHARS + 1, lambda: release.wait(20)))
            for _ in range(4)
        ]
        assert await threads.run(10, lambda: "short") == "short"
        started = [each.name for each in threading.enumerate() if each not in before]
        assert sum("long" in name for name in started) == 1, "which all of them share"
        assert not any(each.done() for each in long)
        release.set()
        assert await asyncio.gather(*long) == [True] * 4

    in_loop(check)


def test_long_texts_that_wait_are_bounded() -> None:
    release, ran = threading.Event(), []

    async def check() -> None:
        threads, half = EncodingThreads(), MAX_WAITING_CHARS // 2
        first = asyncio.ensure_future(threads.run(half, lambda: release.wait(20)))
        second = asyncio.ensure_future(threads.run(half, lambda: ran.append(2)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await threads.run(half, lambda: ran.append(3))
        assert full.value.status_code == 429
        second.cancel()  # its client left before it began
        await asyncio.wait([second])
        assert second.cancelled()  # and was not refused: both halves may wait
        await asyncio.sleep(0)  # the thread's own future is cancelled by a callback
        release.set()
        assert await first
        await threads.run(half, lambda: ran.append(4))
        assert ran == [4]

    in_loop(check)
