"""The small tokenizer beside transformers' own, for what engine and server ask of either."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from chat_families import CHAT_FAMILIES, chat_tokenizer  # noqa: E402
from jinja2 import TemplateError  # noqa: E402
from tokenizer_families import FAMILIES, tokenizer_of  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from anabranch.llm.engine.text_stream import token_decoder  # noqa: E402
from anabranch.llm.grammar.grammar_compiler import GrammarCompiler  # noqa: E402
from anabranch.llm.grammar.structured_outputs import StructuredOutputs  # noqa: E402
from anabranch.llm.models.checkpoint import load_tokenizer  # noqa: E402
from anabranch.llm.models.file_tokenizer import CONFIG, FileTokenizer, file_tokenizer  # noqa: E402
from anabranch.llm.server.tool_grammar import LarkTexts  # noqa: E402

TEXTS = ["", "hello the river\n bends 1234", " é中🙂 <end>", "<user>hello<assistant>"]
TOOL = {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}
HI = {"role": "user", "content": "hi"}
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "asked": ([HI], {"add_generation_prompt": True}),
    "system": ([{"role": "system", "content": "be brief"}, HI], {}),
    "tools": ([HI], {"tools": [TOOL], "add_generation_prompt": True}),
    "variables": ([HI], {"enable_thinking": False, "bos_token": "<x>"}),
    "continued": (
        [HI, {"role": "assistant", "content": "so it "}],
        {"continue_final_message": True},
    ),
}
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'no' %}{{ raise_exception('no such') }}"
    "{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}\n  <{{ m.role }}>\n"
    "{% generation %}{% set x = m.content %}{{ x if x is string else x[-1].text }}"
    "{% endgeneration %}{{ eos_token }}{% endfor %}{{ strftime_now('%Y') }}"
    "{{ tools | tojson(indent=1) if tools }}{{ documents is none }}"
)
STRIPPED = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"


def pair(tokenizer: Any, path: Path) -> tuple[FileTokenizer, Any]:
    tokenizer.save_pretrained(path)
    ours, theirs = file_tokenizer(path), load_tokenizer(path)
    assert ours is not None
    return ours, theirs


def plain(tokenizer: Any, template: str | None = None, **named: str) -> Any:
    """With what the conversion of a GGUF file says of a tokenizer."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=template or tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        **({"eos_token": tokenizer.eos_token} | named),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_texts(family: str, tmp_path: Path) -> None:
    named = {"bos_token": "<user>", "pad_token": "<end>", "unk_token": "<new>"}
    given = tokenizer_of(family)
    given.backend_tokenizer.post_processor = TemplateProcessing(
        single="<user> $A", special_tokens=[("<user>", given.convert_tokens_to_ids("<user>"))]
    )
    ours, theirs = pair(plain(given, **named), tmp_path)
    assert len(ours.encode("the")) == 1 + len(ours.encode("the", add_special_tokens=False))
    for text in TEXTS:
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            told = {"skip_special_tokens": special}
            assert ours.decode(ids, **told) == theirs.decode(ids, **told)
    names = ["eos_token_id", "bos_token", "eos_token", "pad_token", "special_tokens_map"]
    names += ["all_special_tokens", "all_special_ids", "chat_template", "added_tokens_decoder"]
    names += ["clean_up_tokenization_spaces", "model_max_length", "vocab_size"]
    for name in names:
        found, expected = getattr(ours, name), getattr(theirs, name)
        ordered = sorted if isinstance(expected, list) else lambda x: x
        assert ordered(found) == ordered(expected), name
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    for token in ("<end>", "t", "nothing"):
        assert ours.convert_tokens_to_ids(token) == theirs.convert_tokens_to_ids(token)
    assert LarkTexts(ours)._ids == LarkTexts(theirs)._ids  # pyright: ignore[reportPrivateUsage]
    assert token_decoder(ours, True).bytes_of == token_decoder(theirs, True).bytes_of
    assert ours("hello")["input_ids"] == theirs("hello")["input_ids"], "by transformers"


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", CHAT_FAMILIES)
def test_conversations(family: str, chat: str, tmp_path: Path) -> None:
    ours, theirs = pair(plain(chat_tokenizer(family)), tmp_path)
    messages, given = CHATS[chat]
    for options in ({"tokenize": False}, {"return_dict": False}):
        try:
            expected = theirs.apply_chat_template(messages, **given, **options)
        except (TemplateError, ValueError) as error:
            with pytest.raises(type(error)):
                ours.apply_chat_template(messages, **given, **options)
            continue
        assert ours.apply_chat_template(messages, **given, **options) == expected
    assert "_whole" not in vars(ours), "transformers was not asked"


@pytest.mark.parametrize("template", [MARKED, STRIPPED])
@pytest.mark.parametrize(
    ("messages", "given"),
    [
        ([HI, {"role": "assistant", "content": "so  it "}], {"continue_final_message": True}),
        ([HI, {"role": "assistant", "content": "so"}], {"continue_final_message": "content"}),
        ([HI, {"role": "assistant", "content": None}], {"continue_final_message": True}),
        ([HI, {"role": "assistant", "content": "x"}], {"continue_final_message": "thoughts"}),
        ([dict(HI) for _ in range(5)], {"tools": [TOOL]}),
        ([dict(HI) for _ in range(5)], {"continue_final_message": True}),
        ([{"role": "no", "content": "x"}], {}),
        ([HI], {"continue_final_message": True, "add_generation_prompt": True}),
        ([], {}),
    ],
)
def test_templates(
    template: str, messages: list[Any], given: dict[str, Any], tmp_path: Path
) -> None:
    """Spaces that stay or go, parts of contents, and the errors."""
    ours, theirs = pair(plain(tokenizer_of("byte-level"), template), tmp_path)
    found: list[Any] = []
    for each in (theirs, ours):
        try:
            found.append(each.apply_chat_template(messages, tokenize=False, **given))
        except (TemplateError, ValueError) as error:
            found.append(type(error))
    assert found[0] == found[1]


def test_parts_are_continued(tmp_path: Path) -> None:
    ours, theirs = pair(plain(tokenizer_of("byte-level"), MARKED), tmp_path)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "so it"}]
    messages = [HI, {"role": "assistant", "content": parts}]
    given: Any = {"continue_final_message": True, "tokenize": False}
    expected = theirs.apply_chat_template(messages, **given)
    assert ours.apply_chat_template(messages, **given) == expected
    assert parts[1]["text"] == "so it"


def test_what_transformers_does(tmp_path: Path) -> None:
    """Dictionaries, batches, functions as tools, other templates."""
    ours, theirs = pair(plain(tokenizer_of("byte-level")), tmp_path)
    assert inspect.signature(ours.apply_chat_template).parameters.keys() == (
        inspect.signature(theirs.apply_chat_template).parameters.keys()
    )
    for given in ({}, {"chat_template": STRIPPED, "tokenize": False}, {"max_length": 3}):
        assert ours.apply_chat_template([HI], **given) == theirs.apply_chat_template([HI], **given)
    assert ours.apply_chat_template([[HI], [HI]], return_dict=False) == (
        theirs.apply_chat_template([[HI], [HI]], return_dict=False)
    )
    assert ours.batch_decode([[5, 6], [7]]) == theirs.batch_decode([[5, 6], [7]])
    with pytest.raises(AttributeError):
        _ = ours.no_such_name


def test_it_goes_to_another_process(tmp_path: Path) -> None:
    ours, _ = pair(plain(tokenizer_of("byte-level")), tmp_path)
    other = pickle.loads(pickle.dumps(ours))
    assert other.encode("hello") == ours.encode("hello")
    assert other.chat_template == ours.chat_template


def test_grammars_know_its_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    ours, theirs = pair(plain(tokenizer_of("byte-level")), tmp_path)
    wanted = StructuredOutputs(choice=("hello", "the"))
    masks: list[bytes] = []
    for each in (ours, theirs):
        compiler = GrammarCompiler(each, len(each), [each.eos_token_id])
        words = np.zeros(-(-len(each) // 32), np.int32)
        compiler.compile(wanted).begin().fill(words)
        masks.append(words.tobytes())
    assert masks[0] == masks[1] and any(masks[0])


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"clean_up_tokenization_spaces": True},
        {"add_bos_token": True},
        {"eos_token": {"content": "<end>"}},
    ],
)
def test_what_is_left_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    pair(plain(tokenizer_of("byte-level")), tmp_path)
    path = tmp_path / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert file_tokenizer(tmp_path) is None


def test_a_damaged_file(tmp_path: Path) -> None:
    pair(plain(tokenizer_of("byte-level")), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        file_tokenizer(tmp_path)
