"""What the server and the engine's process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from anabranch.engine.sampling_params import SamplingParams
from anabranch.engine.stats import EngineStats


class Add(NamedTuple):
    """Run a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams


class Abort(NamedTuple):
    """End a request that nobody reads any more."""

    request_id: str


class Loading(NamedTuple):
    """A step of the start, with how much of it is done."""

    what: str
    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine takes requests; what the server has to know of it."""

    model_name: str
    tokenizer: Any | None
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    max_drafts: int
    device: str


class Outputs(NamedTuple):
    """What a step brought: deltas, packed."""

    packed: list[tuple[Any, ...]]


class Refused(NamedTuple):
    """A request that the engine does not run."""

    request_id: str
    reason: str


class Failed(NamedTuple):
    """The engine's last words."""

    reason: str
    trace: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts of the engine at one moment."""

    stats: EngineStats
    num_running: int
    num_waiting: int
    cache_usage: float  # share of the pages that sequences hold
