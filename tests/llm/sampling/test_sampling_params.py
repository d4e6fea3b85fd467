"""Sampling options: defaults, normal forms and refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from anabranch.llm.sampling.params import SamplingParams, Work

REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 1.0, True, "1", None],
    "temperature": [-0.1, 1e300, math.nan, math.inf, "1", None, False],
    "top_p": [0, -0.1, 1.1, math.nan, None],
    "top_k": [-2, 1.5, True, None],
    "min_p": [-0.1, 1.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, "0"],
    "repetition_penalty": [0, -1.0, 1e-40, 1e300, math.inf, math.nan],
    "seed": [1.0, True, 2**63, -(2**63) - 1, "7"],
    "stop": ["", [""], [1], 3, {"a": 1}, b"x"],
    "stop_token_ids": [[-1], [1.0], [True], 3, "12"],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [0, None],
    "max_tokens": [0, -1, 1.5, True],
    "min_tokens": [-1, 17, True],
    "logprobs": [-1, True, 1.0],
    "prompt_logprobs": [-1, False],
    "logit_bias": [[1], {"1": 0.5}, {-1: 0.5}, {1: math.nan}, {1: 101}, {1: None}, {True: 1.0}],
    "skip_special_tokens": [1, None],
    "truncate_prompt_tokens": [0, -1, 1.0],
    "speculate": [1, "no"],
    "structured_outputs": ["json", 3],
    "bad_words": [[""], [1], 3],
    "allowed_token_ids": [[-1], [1.0], 3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        SamplingParams(**{name: value})
    told = value
    if isinstance(value, list):
        told = value[0]
    elif isinstance(value, dict) and name == "logit_bias":
        ((key, bias),) = value.items()
        told = bias if type(key) is int and key >= 0 else key
    assert repr(told) in str(refusal.value)


def test_every_option_has_refusals() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == REFUSED.keys()


# The largest and smallest values that are taken; a little more or less is refused.
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1], [0]),
    "temperature": ([0, 1e6], [-1e-9, 1e6 + 1]),
    "top_p": ([1e-9, 1], [0, 1 + 1e-9]),
    "top_k": ([-1, 0, 1], [-2]),
    "min_p": ([0, 1], [-1e-9, 1 + 1e-9]),
    "presence_penalty": ([-2, 2], [-2 - 1e-9, 2 + 1e-9]),
    "frequency_penalty": ([-2, 2], [-2 - 1e-9, 2 + 1e-9]),
    "repetition_penalty": ([1e-6, 1e6], [0.9e-6, 1e6 + 1]),
    "seed": ([-(2**63), 2**63 - 1, 0], [-(2**63) - 1, 2**63]),
    "stop_token_ids": ([[0]], [[-1]]),
    "max_tokens": ([1, None], [0]),
    "min_tokens": ([0, 16], [-1, 17]),
    "logprobs": ([0, None], [-1]),
    "prompt_logprobs": ([0, None], [-1]),
    "logit_bias": ([{0: -100}, {0: 100}], [{-1: 0}, {0: -100.1}, {0: 100.1}]),
    "truncate_prompt_tokens": ([1, None], [0]),
    "speculate": ([True, False, None], [0]),
    "allowed_token_ids": ([[0], None], [[-1]]),
    "stop": ([None, "a", ["a"]], [""]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name: str) -> None:
    taken, refused = BOUNDS[name]
    for value in taken:
        SamplingParams(**{name: value})
    for value in refused:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_defaults() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": {},
        "skip_special_tokens": True,
        "truncate_prompt_tokens": None,
        "speculate": None,
        "structured_outputs": None,
        "bad_words": (),
        "allowed_token_ids": None,
    }
    assert not (params.greedy or params.penalised or params.constrained)


@pytest.mark.parametrize(
    "options",
    [{"bad_words": ["a"]}, {"allowed_token_ids": [3]}, {"structured_outputs": {"regex": "a"}}],
)
def test_constrained(options: dict[str, Any]) -> None:
    assert SamplingParams(**options).constrained


@pytest.mark.parametrize(
    ("name", "value"),
    [("presence_penalty", 0.1), ("frequency_penalty", -0.1), ("repetition_penalty", 0.9)],
)
def test_penalised(name: str, value: float) -> None:
    assert SamplingParams(**{name: value}).penalised


def test_normal_forms() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(allowed_token_ids=[3, 4]).allowed_token_ids == (3, 4)
    with pytest.raises(ValueError, match="allowed_token_ids must not be empty"):
        SamplingParams(allowed_token_ids=[])
    bias = {3: 1}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 2
    assert params.logit_bias == {3: 1}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 9e-6}, {"top_k": 1}])
def test_greedy(options: dict[str, Any]) -> None:
    assert SamplingParams(**options).greedy


@pytest.mark.parametrize("options", [{"temperature": 1e-5}, {"top_k": 2}])
def test_not_greedy(options: dict[str, Any]) -> None:
    assert not SamplingParams(**options).greedy


def test_no_limit_on_tokens_allows_any_minimum() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_from_dict() -> None:
    options = {"n": 2, "stop": "x", "logit_bias": {5: -1.5}, "speculate": False}
    assert SamplingParams.from_dict(options) == SamplingParams(**options)
    with pytest.raises(ValueError, match="unknown sampling options: temprature, top_a"):
        SamplingParams.from_dict({"top_a": 1, "temprature": 0, "n": 1})


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "length_penalty", "early_stopping"])
def test_beam_search_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"beam search is not supported.*{name}"):
        SamplingParams.from_dict({name: 2})


def test_unknown_options_and_changes_are_errors() -> None:
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_the_least_number_of_tokens_may_be_the_most() -> None:
    params = SamplingParams(min_tokens=4, max_tokens=4)
    assert (params.min_tokens, params.max_tokens) == (4, 4)
    with pytest.raises(ValueError, match="min_tokens 5 exceeds max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


WORK: list[tuple[dict[str, Any], Work]] = [
    ({}, Work.DRAW),
    ({"temperature": 0}, Work.GREEDY),
    ({"temperature": 0, "top_p": 0.5, "min_p": 0.5}, Work.GREEDY),
    ({"temperature": 0.5}, Work.DRAW | Work.TEMPERATURE),
    ({"min_p": 0.1}, Work.DRAW | Work.MIN_P),
    ({"top_k": 9}, Work.DRAW | Work.TOP_K),
    ({"top_k": 10}, Work.DRAW),
    ({"top_p": 0.9}, Work.DRAW | Work.TOP_P),
    ({"logit_bias": {3: 0.0}}, Work.DRAW | Work.BIAS),
    ({"min_tokens": 1}, Work.DRAW | Work.MIN_TOKENS),
    ({"presence_penalty": 0.5}, Work.DRAW | Work.PENALTIES),
    ({"logprobs": 0}, Work.DRAW | Work.LOGPROBS),
]


@pytest.mark.parametrize(("options", "work"), WORK, ids=str)
def test_a_request_asks_for_the_work_that_it_needs(options: dict[str, Any], work: Work) -> None:
    assert Work.of(SamplingParams(**options), vocab_size=10) is work
