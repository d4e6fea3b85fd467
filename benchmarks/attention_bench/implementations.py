"""What is compared: an implementation binds itself to inputs, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from attention_bench.exact import CallResult, Expected

Call = Callable[[], Any]


class UnavailableError(Exception):
    """An implementation is not installed here, or does not cover a case."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An implementation bound to inputs: a call for each rotation, nothing left but to launch."""

    calls: Sequence[Call]
    answer: Callable[[Any], CallResult]  # a call's result in this library's convention
    plan: Call | None = None  # what an engine runs once a step, outside the calls
    context: Callable[[], AbstractContextManager[object]] = nullcontext  # entered around all calls
    expected: Expected | None = None  # of its own, if it is there to be compared with only


class Implementation(NamedTuple):
    """Ours, a peer that ratios are taken to, or context: shown beside them, in no ratio."""

    name: str
    role: Literal["ours", "peer", "context"]
    prepare: Callable[[Any], Prepared]  # takes the MergeInputs or AttendInputs of a case


def require(condition: bool, reason: str) -> None:
    """Say why a case is not covered."""
    if not condition:
        raise UnavailableError(reason)
