"""Answers match their schema, whatever drafts them, and drafts change no token."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from typing import Any

import pytest
from json_schemas import every_schema
from server_models import talking_model, tiny_tokenizer
from tiny_models import as_on_gpu, tiny

jsonschema_rs = pytest.importorskip("jsonschema_rs")

from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.grammar.structured_outputs import StructuredOutputs  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402

DRAFTS: dict[str, Any] = {
    "none": None,
    "n-grams": {"method": "ngram", "min_ngram": 1, "adaptive": False},
    "trees": {
        "method": "ngram",
        "min_ngram": 1,
        "tree_width": 3,
        "num_drafts": 8,
        "adaptive": False,
    },
    "draft model": {"method": "draft", "model": "", "num_drafts": 3, "adaptive": False},
    "trees of a draft model": {
        "method": "draft",
        "model": "",
        "tree_width": 2,
        "num_drafts": 6,
        "adaptive": False,
    },
}
MOST = 400
# One text has a format, patterns of its own and of a reference, and eight of an alternative.
MANY_PATTERNS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"format": "date", "pattern": "1", "$ref": "#/$defs/x~1y"}},
    "$defs": {
        "x/y": {"pattern": "2", "anyOf": [{"pattern": "0"}, {"$ref": "#/$defs/z"}]},
        "z": {"allOf": [{"pattern": str(place)} for place in range(3, 11)]},
    },
}


@cache
def engine(drafts: str, **options: Any) -> LLM:
    speculative = DRAFTS[drafts]
    if speculative is not None and "model" in speculative:
        speculative = speculative | {"model": talking_model()}
    given = {"device": "cpu", "max_num_seqs": 16, "speculative": speculative} | options
    return LLM(talking_model(), **given)


def params(wanted: dict[str, Any], **options: Any) -> SamplingParams:
    """Ends of values are likelier than a model of random weights has them."""
    tokenizer = tiny_tokenizer()
    ends = {tokenizer.convert_tokens_to_ids(mark): 3.0 for mark in '"}],'}
    given = {"max_tokens": MOST, "seed": 7, "logit_bias": ends} | options
    return SamplingParams(structured_outputs=StructuredOutputs(**wanted), **given)


@cache
def answers(drafts: str) -> dict[str, tuple[str, tuple[int, ...], str | None]]:
    schemas = every_schema()
    outputs = engine(drafts).generate(
        ["hello the"] * len(schemas),
        [params({"json": schema}, seed=place) for place, schema in enumerate(schemas.values())],
    )
    found = [(request.outputs[0], request.error) for request in outputs]
    return {
        name: (output.text, tuple(output.token_ids), error or output.finish_reason)
        for name, (output, error) in zip(schemas, found, strict=True)
    }


def test_there_are_many_schemas() -> None:
    assert len(every_schema()) > 200


@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_answer_is_valid(drafts: str) -> None:
    schemas, wrong = every_schema(), dict[str, Any]()
    for name, (text, _, reason) in answers(drafts).items():
        try:
            valid = jsonschema_rs.is_valid(schemas[name], json.loads(text), validate_formats=True)
        except ValueError as error:
            valid = error
        if reason != "stop" or valid is not True:
            wrong[name] = reason, text, valid
    assert not wrong


@pytest.mark.parametrize("drafts", [name for name in DRAFTS if name != "none"])
def test_drafts_change_no_token(drafts: str) -> None:
    assert answers(drafts) == answers("none")
    assert engine(drafts).stats.speculative.num_accepted_tokens > 0


@pytest.mark.parametrize("in_flight", [False, True])
def test_threads_change_no_token(in_flight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are made ahead by several threads, or one by one: of one grammar, some, and none."""
    wanted: list[dict[str, Any]] = [{"json_object": True}] * 12
    wanted += [{"regex": "[a-z]{3,9}"}, {"choice": ("yes", "no")}] * 2
    given = [params(each, seed=place, max_tokens=40) for place, each in enumerate(wanted)]
    given += [SamplingParams(max_tokens=40, seed=place, stop=["e"]) for place in range(4)]
    given.append(params({"choice": ("yes", "no")}, bad_words=["yes", "no"]))  # fails
    found: list[list[tuple[Any, ...]]] = []
    for cores in (1, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        llm = LLM(talking_model(), device="cpu", max_num_seqs=16, speculative=None)
        outputs = (as_on_gpu(llm) if in_flight else llm).generate(["hello the"] * len(given), given)
        found.append(
            [(x.outputs[0].token_ids, x.outputs[0].finish_reason, x.error) for x in outputs]
        )
    assert found[0] == found[1]
    assert [error is not None for *_, error in found[0]] == [False] * (len(given) - 1) + [True]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{1,4}x"}, "[a-c]{3}-[0-9]{1,4}x"),
        ({"choice": ["the river", 'a "bend"', "é"]}, 'the river|a "bend"|é'),
        ({"grammar": 'start: "a" b+\nb: "(" b? ")"'}, r"a[()]+"),
        ({"grammar": 'root ::= "a" digit+ "."\ndigit ::= [0-9]'}, r"a[0-9]+\."),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_other_forms(drafts: str, wanted: dict[str, Any], pattern: str) -> None:
    llm = engine(drafts)
    most = [params(wanted, n=3, max_tokens=MOST, temperature=t) for t in (0, 1)]
    for request in llm.generate(["hello"] * 2, most):
        assert request.error is None
        for output in request.outputs:
            if output.finish_reason == "stop":
                assert re.fullmatch(pattern, output.text), output.text
        assert any(output.finish_reason == "stop" for output in request.outputs) or (
            "grammar" in wanted or "json_object" in wanted
        )


def test_penalties_logprobs_and_preemption() -> None:
    """Preempted sequences keep their place in the grammar; the tokens are the same."""
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}}
    wanted = params(
        {"json": schema | {"minItems": 12, "maxItems": 12}},
        n=4,
        logprobs=2,
        presence_penalty=0.5,
        repetition_penalty=1.2,
    )
    (roomy,) = engine("none").generate(["hello"], wanted)
    scarce = engine("none", kv_cache_gib=9 * 16 * 2 * 2 * 2 * 16 * 4 / 2**30, max_model_len=96)
    (tight,) = scarce.generate(["hello"], wanted)
    assert scarce.stats.num_preemptions > 0
    for one, other in zip(roomy.outputs, tight.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert len(json.loads(one.text)) == 12
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)


def test_bad_words_and_allowed_tokens() -> None:
    llm, tokenizer = engine("n-grams"), tiny_tokenizer()
    listed = [tokenizer.convert_tokens_to_ids(mark) for mark in "abch"] + [
        tokenizer.convert_tokens_to_ids("hello")
    ]
    options = {"max_tokens": 60, "seed": 1, "ignore_eos": True}
    (free,) = llm.generate(["x"], SamplingParams(allowed_token_ids=listed, **options))
    assert set(free.outputs[0].token_ids) <= set(listed)
    assert "ab" in free.outputs[0].text and "hello" in free.outputs[0].text
    banned = SamplingParams(allowed_token_ids=listed, bad_words=["ab", "hello", "c"], **options)
    (output,) = llm.generate(["x"], banned)
    assert not re.search("ab|hello|c", output.outputs[0].text)


def test_rules_that_leave_no_token_end_one_request() -> None:
    llm, tokenizer = engine("none"), tiny_tokenizer()
    no_way = params({"regex": "b+"}, allowed_token_ids=[tokenizer.convert_tokens_to_ids("a")])
    fine = params({"regex": "b{3}"})
    failed, good = llm.generate(["x", "x"], [no_way, fine])
    assert failed.error is not None and "no token may follow" in failed.error
    assert good.outputs[0].text == "bbb"


def test_a_grammar_out_of_fuel_ends_its_request() -> None:
    """Others of the same grammar are answered: those that wait meanwhile, and those that come."""
    llm, tokenizer = engine("none"), tiny_tokenizer()
    regex = {"regex": "((a{1000}){200}b|(a{999}){300}c)|b{3}"}
    slow = params(regex, logit_bias={tokenizer.convert_tokens_to_ids("a"): 100}, max_tokens=200)
    fine = params(regex, logit_bias={tokenizer.convert_tokens_to_ids("b"): 100})
    failed, *good = llm.generate(["x"] * 40, [slow] + [fine] * 39)
    assert failed.error is not None and "too many expressions" in failed.error
    shared = [each for each in good[:15] if each.error is not None]  # in the same batch
    assert len(shared) < 15 and all(each.outputs[0].text == "bbb" for each in good[15:])
    (later,) = llm.generate(["x"], fine)
    assert later.error is None and later.outputs[0].text == "bbb"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "(abc"}, "(?s)regex cannot be compiled.*unclosed group"),
        ({"grammar": "start: foo"}, r"grammar cannot be compiled: at 1\(8\): unknown name"),
        ({"json": {"type": "objct"}}, "json cannot be compiled: Invalid type: objct"),
        (
            {"json": {"properties": {"a": {"items": {"anyOf": [{"not": {}}]}}}}},
            r'json.properties.a.items.anyOf.0 cannot be compiled: Unimplemented keys: \["not"\]',
        ),
        ({"json": {"multipleOf": 3_000_017}}, "json: multipleOf 3000017 takes too much time"),
        (
            {"json": {"anyOf": [{"multipleOf": 9.97}, {"multipleOf": -991}]}},
            "multipleOf 9.97 takes",
        ),
        (
            {"grammar": 'start: %json {"multipleOf": 997} | %json\n{"mul\\u0074ipleOf": 991}'},
            "grammar: multipleOf 99[17] takes too much time",
        ),
        (
            {"json": {}, "prelude": 'prelude: %json {"multipleOf": 3000017}'},
            "json: multipleOf 3000017 takes too much time",
        ),
        ({"json": MANY_PATTERNS}, "json: a text that must match 11 patterns and formats takes"),
        (
            {"grammar": f"start: %json {json.dumps(MANY_PATTERNS)}"},
            "grammar: a text that must match 11 patterns and formats takes",
        ),
        ({"json": '{"allOf": [' * 450 + "{}" + "]}" * 450}, "json: .*recursion"),
        ({"json": "{"}, "json is no valid JSON"),
        ({"json": {"a": {1}}}, "json is no JSON schema"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must hold texts"),
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"regex": "a" * 200_000}, "regex has 200000 bytes"),
        ({"regex": 3}, "regex must be text, got 3"),
    ],
)
def test_what_cannot_be_compiled_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine("none").generate(["x"], params(wanted))
    assert not engine("none").engine.has_work


def test_models_without_a_tokenizer_refuse() -> None:
    llm = tiny()
    for options in ({"structured_outputs": {"regex": "a"}}, {"bad_words": ["a"]}):
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate([[3, 4]], SamplingParams(**options))
    (output,) = llm.generate([[3, 4]], SamplingParams(allowed_token_ids=[5], max_tokens=3))
    assert output.outputs[0].token_ids == [5, 5, 5]
