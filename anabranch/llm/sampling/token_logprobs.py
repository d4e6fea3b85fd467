"""Logprobs of one token as users read them, by token id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.llm.sampling.batch import HostLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log of a token's probability, and its place among all tokens."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]  # the token itself and the likeliest ones, by id


def sampled_entry(token: int, logprobs: HostLogprobs, place: int, wanted: int) -> TokenLogprobs:
    """The entry of an emitted token, at `place` among those of its sequence."""
    entry = top_entries(logprobs.top_ids[place], logprobs.top[place], wanted)
    entry[token] = Logprob(float(logprobs.chosen[place]), int(logprobs.ranks[place]))
    return entry


def top_entries(ids: Any, values: Any, wanted: int) -> TokenLogprobs:
    """The likeliest tokens, the first of rank 1."""
    pairs = zip(ids[:wanted].tolist(), values[:wanted].tolist(), strict=True)
    return {token: Logprob(value, rank) for rank, (token, value) in enumerate(pairs, 1)}
