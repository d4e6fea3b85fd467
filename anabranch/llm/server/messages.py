"""Messages between the server and the engine's process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.packed_deltas import pack, unpack


class Add(NamedTuple):
    """Run a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams


class Abort(NamedTuple):
    """End a request whose client is gone."""

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
    page_size: int
    max_drafts: int
    device: str
    sampling_defaults: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_pages * self.page_size


@dataclass(frozen=True, slots=True)
class Outputs:
    """Deltas of one step, packed and unpacked by the threads that write and read them."""

    deltas: list[RequestDelta]

    def __reduce__(self) -> tuple[Any, ...]:
        return _outputs, (pack(self.deltas),)


def _outputs(packed: list[tuple[Any, ...]]) -> Outputs:
    return Outputs(unpack(packed))


class Refused(NamedTuple):
    """A request that the engine does not run, for a reason the client can change."""

    request_id: str
    reason: str


class Broken(NamedTuple):
    """A request that ended with an error of the engine; the others continue."""

    request_id: str
    reason: str


class Failed(NamedTuple):
    """Why the engine's process is about to end."""

    reason: str
    trace: str


class Beat(NamedTuple):
    """The engine's process lives; how long the step under way has taken."""

    step_seconds: float  # 0 when there is none


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts of the engine at one moment."""

    stats: EngineStats
    num_running: int
    num_waiting: int
    cache_usage: float  # share of the pages that sequences hold
