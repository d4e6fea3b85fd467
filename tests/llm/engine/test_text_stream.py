"""Tokens become text as they come: characters cut in half, stop strings, special tokens."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from tiny_models import as_on_gpu, assert_idle, source, writing_source  # noqa: E402
from tiny_tokenizers import FAMILIES  # noqa: E402

from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.engine.text_stream import (  # noqa: E402
    Detokeniser,
    StopStrings,
    TextStream,
    token_decoder,
)
from anabranch.llm.models import load_model, smollm2_directory  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402

TEXT = "Ünïcode 🙂🙃 and 12345 – «done».\n\n"
NGRAM = {"method": "ngram", "min_ngram": 1, "adaptive": False}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2_directory())


def push_all(stream: TextStream, ids: list[int]) -> list[str]:
    """What is shown after each token, until a stop string."""
    shown: list[str] = []
    for token in ids:
        stopped = stream.push(token)
        shown.append(stream.stable_text)
        if stopped:
            break
    return shown


def test_text_is_that_of_the_tokenizer(tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) > len(TEXT.split()) + 5, "some characters are several tokens"
    for cut in range(len(ids)):
        if tokenizer.decode(ids[:cut]).endswith("�"):
            continue
        stream = TextStream(tokenizer, prompt=ids[:cut])
        shown = push_all(stream, ids[cut:])
        assert tokenizer.decode(ids[:cut]) + stream.text == TEXT
        assert all(after.startswith(before) for before, after in pairwise(shown))
        assert not any("�" in text for text in shown)


def test_half_a_character_before_does_not_come_again(tokenizer: Any) -> None:
    ids = tokenizer("some words before it 🙂")["input_ids"]
    stream = TextStream(tokenizer, prompt=ids[:-1])
    push_all(stream, [ids[-1], *tokenizer(" more")["input_ids"]])
    assert stream.text.endswith(" more") and "before" not in stream.text


def test_special_tokens_are_text_only_if_wanted(tokenizer: Any) -> None:
    ids = [*tokenizer("a")["input_ids"], tokenizer.eos_token_id, *tokenizer("b")["input_ids"]]
    for skip, text in ((True, "ab"), (False, f"a{tokenizer.eos_token}b")):
        stream = TextStream(tokenizer, skip_special=skip)
        push_all(stream, ids)
        assert stream.text == text


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, prompt=[1, 2])
    assert push_all(stream, [3, 4]) == ["", ""] and stream.stopped_by is None


@given(
    st.text("ab<.", min_size=1, max_size=24),
    st.lists(st.text("ab<.", min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string_and_nothing_shown_is_taken_back(
    text: str, stop: list[str], include: bool
) -> None:
    stream = TextStream(Letters(), stop=StopStrings(stop), include_stop=include)
    shown = push_all(stream, [ord(letter) for letter in text])
    assert all(after.startswith(before) for before, after in pairwise(shown))
    ends = [(text.find(each) + len(each), each) for each in stop if each in text]
    if not ends:
        assert stream.text == text and stream.stopped_by is None
        assert text.startswith(stream.stable_text)
        return
    end = min(ends)[0]  # the first to be complete, the longest of those
    begin = min(text.find(each) for place, each in ends if place == end)
    assert stream.stopped_by == text[begin:end]
    assert stream.text == stream.stable_text == text[: end if include else begin]


# Tokenizers of all families


@cache
def family(name: str) -> Any:
    return FAMILIES[name]()


def ids_of(name: str, *tokens: str) -> list[int]:
    return [family(name).convert_tokens_to_ids(token) for token in tokens]


TOKENS = st.lists(st.integers(0, 2**20), max_size=40)


@pytest.mark.parametrize("skip", [True, False], ids=["text only", "with special tokens"])
@pytest.mark.parametrize("name", FAMILIES)
@given(picks=TOKENS)
def test_streamed_text_is_that_of_all_tokens(name: str, skip: bool, picks: list[int]) -> None:
    tokenizer = family(name)
    ids = [pick % (len(tokenizer) + 2) for pick in picks]  # the last two are no tokens
    stream = TextStream(tokenizer, skip_special=skip)
    shown = push_all(stream, ids)
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert all(after.startswith(before) for before, after in pairwise([*shown, stream.text]))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "cleaned" not in name])
@given(picks=TOKENS, cut=st.integers(0, 40))
def test_a_continuation_is_what_it_adds_to_its_prompt(
    name: str, picks: list[int], cut: int
) -> None:
    tokenizer = family(name)
    ids = [pick % len(tokenizer) for pick in picks]
    around = ids[max(cut - 1, 0) : cut + 1]
    stream = TextStream(tokenizer, prompt=ids[:cut])
    push_all(stream, ids[cut:])
    before, whole = (tokenizer.decode(each, skip_special_tokens=True) for each in (ids[:cut], ids))
    runs_on = {"<0x"} == {token[:3] for token in tokenizer.convert_ids_to_tokens(around)}
    if whole.startswith(before) and not before.endswith("�") and not runs_on:
        assert before + stream.text == whole


def test_bytes_that_are_no_text() -> None:
    name = "byte-fallback BPE"
    stream = TextStream(family(name))
    shown = push_all(stream, ids_of(name, "<0x41>", "<0xE4>", "▁a", "<0xE4>"))
    assert shown == ["", "", "�� a", "�� a"], "the run of bytes is text once it is over"
    assert stream.text == "�� a�"


def test_a_byte_may_stop_at_once() -> None:
    name = "byte-fallback BPE"
    stream = TextStream(family(name), stop=StopStrings(["\n"]), prompt=ids_of(name, "a", "<0xE4>"))
    assert not stream.push(*ids_of(name, "▁the"))
    assert stream.push(*ids_of(name, "<0x0A>")), "not with the token after it"
    assert stream.text == " the"


@pytest.mark.parametrize("token", ["<0x80>", "<0x41>"])
def test_long_runs_of_bytes_take_linear_time(token: str) -> None:
    calls = 0
    texts = token_decoder(family("byte-fallback BPE"), True)

    def counted_decode(ids: Any) -> str:
        nonlocal calls
        calls += len(ids)
        return texts.decode(ids)

    pieces = Detokeniser(texts._replace(decode=counted_decode))
    byte, word = ids_of("byte-fallback BPE", token, "a")
    for _ in range(3000):
        pieces.push(byte)
    pieces.push(word)
    assert len(pieces.text) == 3001 and calls < 10000


def test_half_characters_without_end_are_settled() -> None:
    name, halves = "byte-level BPE", ["ð", "Ł", "ð", "Ģ"]
    tokens = ids_of(name, *halves * 50)
    pieces = Detokeniser(token_decoder(family(name), True))
    for token in tokens:
        pieces.push(token)
        assert len(pieces._waiting) <= 16
    assert pieces.text + pieces.pending == family(name).decode(tokens)


@pytest.mark.parametrize("name", ["byte-fallback BPE", "byte-level BPE"])
def test_an_engine_writes_whatever_bytes_come(name: str, tmp_path: Path) -> None:
    """Random tokens at a high temperature: hardly a run of bytes is UTF-8."""
    tokenizer = family(name)
    tokenizer.save_pretrained(tmp_path)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1}
    load_model(source(**shape), device="cpu").model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", max_num_seqs=4)
    prompt = [tokenizer.convert_tokens_to_ids("a")] * 2
    params = SamplingParams(n=4, temperature=5.0, seed=1, max_tokens=60, ignore_eos=True)
    (found,) = llm.generate([prompt], params)
    texts = [one.text for one in found.outputs]
    assert "�" in "".join(texts)
    for one in found.outputs:
        whole = tokenizer.decode(prompt + one.token_ids, skip_special_tokens=True)
        assert tokenizer.decode(prompt) + one.text == whole
        assert one.finish_reason == "length"


class Letters:
    """A tokenizer whose tokens are characters."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models

        vocab = {chr(code): code for code in range(256)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
        self.backend_tokenizer.decoder = decoders.Fuse()


def test_a_stop_string_that_may_not_stop_is_text(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=StopStrings(["stop", "s and stops"]))
    ids = [tokenizer(word)["input_ids"] for word in ("a stop", " and", " stop", " here")]
    assert not any(stream.push(token, may_stop=False) for token in ids[0] + ids[1])
    assert stream.text == "a stop and"
    stopped = [stream.push(token) for token in ids[2]]
    assert stopped[-1] and stream.text == "a stop and " and stream.stopped_by == "stop"


# The same through an engine, whose text is arbitrary: stop strings are cut out of it.


@pytest.fixture(scope="module", params=["plain", "n-gram", "in flight"])
def llm(request: pytest.FixtureRequest) -> LLM:
    speculative = NGRAM if request.param == "n-gram" else None
    llm = LLM(writing_source(), device="cpu", max_num_seqs=2, speculative=speculative)
    return as_on_gpu(llm) if request.param == "in flight" else llm


def answer(llm: LLM, **options: Any) -> Any:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True} | options)
    parts = [found.outputs[0] for found in llm.stream("Once upon a time", params)]
    texts = [part.text for part in parts]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert_idle(llm)
    return parts[-1]


def test_stop_strings(llm: LLM) -> None:
    whole = answer(llm)
    assert whole.text == llm.tokenizer.decode(whole.token_ids)
    middle = len(whole.text) // 2
    stop = whole.text[middle - 4 : middle + 5]  # over several tokens
    before = whole.text[: whole.text.index(stop)]
    found = answer(llm, stop=["never this", stop])
    assert (found.text, found.finish_reason, found.stop_reason) == (before, "stop", stop)
    assert len(found.token_ids) < len(whole.token_ids)
    assert answer(llm, stop=stop, include_stop_str_in_output=True).text == before + stop
    late = answer(llm, stop=stop, min_tokens=30)
    assert late.text == whole.text and late.finish_reason == "length"


def test_a_stop_token_is_text_only_if_wanted(llm: LLM) -> None:
    whole = answer(llm)
    token = whole.token_ids[10]
    place = whole.token_ids.index(token)
    piece = llm.tokenizer.decode(whole.token_ids[: place + 1])
    without = answer(llm, stop_token_ids=[token])
    assert without.token_ids == whole.token_ids[: place + 1]
    assert piece.startswith(without.text) and len(without.text) < len(piece)
    assert answer(llm, stop_token_ids=[token], include_stop_str_in_output=True).text == piece


def test_special_tokens_of_a_request(llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_id
    bias = {"logit_bias": {eos: 100.0}, "max_tokens": 3}
    assert answer(llm, **bias).text == ""
    assert answer(llm, skip_special_tokens=False, **bias).text == llm.tokenizer.eos_token * 3
    ended = answer(llm, ignore_eos=False, **bias)
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("", [eos], "stop")


def test_text_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    (found,) = llm.generate("Once upon", params)
    assert found.prompt == "Once upon"
    assert found.prompt_token_ids == llm.tokenizer("Once upon")["input_ids"]
    (same,) = llm.generate(found.prompt_token_ids, params)
    assert same.prompt is None and same.outputs[0].text == found.outputs[0].text
    with pytest.raises(ValueError, match="empty"):
        llm.generate("", params)
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at 1"):
        llm.generate("a\ud800", params)
    with pytest.raises(ValueError, match="lone surrogate"):
        llm.chat_prompt([{"role": "user", "content": "\udfff"}])
    chat = llm.chat_prompt([{"role": "user", "content": "hi"}])
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert llm.chat_prompt([{"role": "user", "content": parts}]) == chat
    image = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
    for wrong, message in (
        ([parts[0], image], "of type 'text', got 'image_url'"),
        ([{"type": "text"}], "holds text, got None"),
        ([{"type": "text", "text": "\udfff"}], "lone surrogate"),
        ([7], "holds text, got 7"),
        ({"type": "text"}, "text or a list of parts"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.chat_prompt([{"role": "user", "content": wrong}])
    assert "hi" in llm.tokenizer.decode(chat) and isinstance(chat[0], int)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_where_it_matters() -> None:
    llm = LLM(writing_source(vocab_size=97), device="cpu", max_num_seqs=1)
    with pytest.raises(ValueError, match="not in the vocabulary of 97"):
        llm.generate("Once upon a time", SamplingParams(max_tokens=1))
    assert_idle(llm)
