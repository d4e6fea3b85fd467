"""Deltas on their way between two processes: plain tuples, with logprobs in columns.

Objects of a class each take microseconds to pickle, in the engine's process among others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from anabranch.llm.sampling.token_logprobs import Logprob, TokenLogprobs
from anabranch.llm.server.deltas import ChoiceDelta, RequestDelta


class LogprobColumns(NamedTuple):
    """Entries of successive tokens."""

    sizes: list[int]  # of each entry; 0 where there is none
    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]


def pack(deltas: Iterable[RequestDelta]) -> list[tuple[Any, ...]]:
    """What pickles fast."""
    return [
        (name, [_pack_choice(choice) for choice in choices], *more, _columns(prompt_logprobs))
        for name, choices, *more, prompt_logprobs in deltas
    ]


def unpack(packed: Iterable[tuple[Any, ...]]) -> list[RequestDelta]:
    """The deltas that were packed."""
    return [
        RequestDelta._make(
            (name, [_unpack_choice(choice) for choice in choices], *more, _entries(scored))
        )
        for name, choices, *more, scored in packed
    ]


def _pack_choice(choice: ChoiceDelta) -> tuple[Any, ...]:
    *fields, logprobs, finish_reason, stop_reason = choice
    return *fields, _columns(logprobs or None), finish_reason, stop_reason


def _unpack_choice(packed: tuple[Any, ...]) -> ChoiceDelta:
    *fields, columns, finish_reason, stop_reason = packed
    return ChoiceDelta._make((*fields, _entries(columns) or [], finish_reason, stop_reason))


def _columns(entries: Sequence[TokenLogprobs | None] | None) -> LogprobColumns | None:
    if entries is None:
        return None
    known = [entry for entry in entries if entry]
    return LogprobColumns(
        [len(entry or ()) for entry in entries],
        [token for entry in known for token in entry],
        [item.logprob for entry in known for item in entry.values()],
        [item.rank for entry in known for item in entry.values()],
    )


def _entries(columns: LogprobColumns | None) -> Any:
    if columns is None:
        return None
    sizes, *values = columns
    pairs = ((token, Logprob(value, rank)) for token, value, rank in zip(*values, strict=True))
    return [dict(islice(pairs, size)) or None for size in sizes]
