"""How the tokens of a request are chosen, and when it ends; the options of a batch, in rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntFlag, auto
from typing import Any, cast

import numpy as np

from anabranch.llm.grammar.structured_outputs import StructuredOutputs, structured_outputs
from anabranch.llm.sampling.batch import Array, Positions, SampleBatch

GREEDY_TEMPERATURE = 1e-5
LARGEST_FACTOR = 1e6  # of scores: the product is finite in float32, and none vanishes
_BEAM_SEARCH = ("best_of", "use_beam_search", "length_penalty", "early_stopping")
_ROW = np.dtype(
    [
        ("work", np.int64),  # of Work
        ("seed", np.int64),
        ("greedy", np.bool_),
        ("inverse_temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_k", np.int64),  # 0: all
        ("top_p", np.float64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("num_top", np.int64),
        ("min_tokens", np.int64),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. Unknown options and values out of range are errors.

    A temperature below 1e-5, or `top_k=1`, takes the most likely token. `top_k` 0 or -1 keeps all
    tokens. `max_tokens=None` is as many as the context holds. `speculate=None` leaves the choice
    to the engine. `structured_outputs` is a form that the answer must have.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    speculate: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, value in {
            "top_k": 0 if _whole("top_k", self.top_k, -1) == -1 else self.top_k,
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "logit_bias": _biases(self.logit_bias),
            "structured_outputs": structured_outputs(self.structured_outputs),
            "bad_words": _strings("bad_words", self.bad_words),
            "allowed_token_ids": _allowed(self.allowed_token_ids),
        }.items():
            object.__setattr__(self, name, value)
        self._check_numbers()
        self._check_lengths()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        if self.speculate is not None:
            _flag("speculate", self.speculate)

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, LARGEST_FACTOR)
        if _real("top_p", self.top_p, 0.0, 1.0) == 0:
            raise ValueError(f"top_p must be above 0, got {self.top_p!r}")
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 1 / LARGEST_FACTOR, LARGEST_FACTOR)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_lengths(self) -> None:
        _whole("n", self.n, 1)
        _whole("min_tokens", self.min_tokens, 0)
        for name in ("max_tokens", "truncate_prompt_tokens"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the scores of later ones."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties)

    @property
    def constrained(self) -> bool:
        """Whether some tokens may not follow others."""
        listed = self.allowed_token_ids is not None
        return self.structured_outputs is not None or bool(self.bad_words) or listed

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """From named options, as of a JSON body. Refuses those that would have no effect."""
        if beam := [name for name in _BEAM_SEARCH if name in options]:
            raise ValueError(f"beam search is not supported, got {', '.join(beam)}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise ValueError(f"unknown sampling options: {', '.join(unknown)}")
        return cls(**options)


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {_range(low, high)}, got {value!r}")
    return value


def _real(name: str, value: Any, low: float, high: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {_range(low, high)} and finite, got {value!r}")
    return value


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _items(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, got {values!r}")
    return tuple(cast("Iterable[Any]", values))


def _strings(name: str, values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else _items(name, values)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{name} must hold strings that are not empty, got {string!r}")
    return strings


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    return tuple(_whole(f"a token of {name}", token, 0) for token in _items(name, values))


def _allowed(values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    tokens = _token_ids("allowed_token_ids", values)
    if not tokens:
        raise ValueError("allowed_token_ids must not be empty")
    return tokens


def _biases(values: Any) -> dict[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias must map tokens to numbers, got {values!r}")
    biases = cast("Mapping[Any, Any]", values)
    return {
        _whole("a token of logit_bias", token, 0): _real("a logit_bias", bias, -100.0, 100.0)
        for token, bias in biases.items()
    }


class Work(IntFlag):
    """What a request needs done, known without a look at the device."""

    GREEDY = auto()
    DRAW = auto()
    TEMPERATURE = auto()
    MIN_P = auto()
    TOP_K = auto()
    TOP_P = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    PENALTIES = auto()
    LOGPROBS = auto()

    @staticmethod
    def of(params: SamplingParams, vocab_size: int) -> Work:
        """The work of one request; that of a batch is the union."""
        work = {
            Work.GREEDY: params.greedy,
            Work.BIAS: bool(params.logit_bias),
            Work.MIN_TOKENS: params.min_tokens > 0,
            Work.PENALTIES: params.penalised,
            Work.LOGPROBS: params.logprobs is not None,
        }
        if not params.greedy:
            work |= {
                Work.DRAW: True,
                Work.TEMPERATURE: params.temperature != 1,
                Work.MIN_P: params.min_p > 0,
                Work.TOP_K: 0 < params.top_k < vocab_size,
                Work.TOP_P: params.top_p < 1,
            }
        return Work(sum(flag for flag, needed in work.items() if needed))


class SamplingRows:
    """A table on the host; what a step needs of it goes to the device with the step."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.table = np.zeros(num_rows, _ROW)
        self._biases: dict[int, tuple[Array, Array]] = {}
        self._stops: dict[int, Array] = {}

    def write(self, row: int, params: SamplingParams, seed: int, eos: Iterable[int]) -> None:
        """Puts a request into a row."""
        stops = set(params.stop_token_ids).union(() if params.ignore_eos else eos)
        self._check_tokens(params, stops)
        entry = self.table[row]
        work = Work.of(params, self.vocab_size)
        entry["work"] = work
        entry["seed"] = seed
        entry["greedy"] = params.greedy
        entry["inverse_temperature"] = 1.0 if params.greedy else 1 / params.temperature
        entry["log_min_p"] = math.log(params.min_p) if params.min_p else -math.inf
        entry["top_k"] = params.top_k if Work.TOP_K in work else 0
        entry["top_p"] = params.top_p
        entry["repetition"] = params.repetition_penalty
        entry["frequency"] = params.frequency_penalty
        entry["presence"] = params.presence_penalty
        entry["num_top"] = params.logprobs or 0
        entry["min_tokens"] = params.min_tokens
        bias = params.logit_bias
        self._biases[row] = np.array([*bias], np.int64), np.array([*bias.values()], np.float32)
        self._stops[row] = np.array(sorted(stops), np.int64)

    def _check_tokens(self, params: SamplingParams, stops: set[int]) -> None:
        for name, tokens in (("logit_bias", params.logit_bias), ("a stop token", stops)):
            if outside := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise ValueError(f"{name} is outside the vocabulary {self.vocab_size}: {outside}")
        if (params.logprobs or 0) > self.vocab_size:
            raise ValueError(f"logprobs {params.logprobs} exceeds vocabulary {self.vocab_size}")

    def biases(self, batch: SampleBatch, positions: Positions) -> tuple[Array, Array]:
        """Indices into the flattened logits and what to add there; -inf bans a stop token."""
        table = self.table[list(batch.rows)]
        num_outputs = np.array(batch.num_outputs, np.int64)[positions.seqs] + positions.steps
        banning = num_outputs < table["min_tokens"][positions.seqs]
        places, biases = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for place in np.flatnonzero(banning | (table["work"] & Work.BIAS > 0)[positions.seqs]):
            row = batch.rows[int(positions.seqs[place])]
            tokens, values = self._biases[row]
            stops = self._stops[row] if banning[place] else places[0]
            places += [tokens + place * self.vocab_size, stops + place * self.vocab_size]
            biases += [values, np.full(stops.size, -np.inf, np.float32)]
        return np.concatenate(places), np.concatenate(biases)
