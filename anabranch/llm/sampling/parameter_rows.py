"""The parameters of running requests, one row each, ready to be gathered for a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntFlag, auto

import numpy as np

from anabranch.llm.sampling.batch import Positions, SampleBatch
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.transfer import Array

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
