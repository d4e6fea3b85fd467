"""An engine as the endpoints see it, whether it restarts or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.server.deltas import RequestDelta
from anabranch.llm.server.messages import Ready, Snapshot


class ServedEngine(Protocol):
    """Answers requests, and says how it is."""

    info: Ready
    num_restarts: int

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest counts, or None where there are none of now."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why no request can be answered now, if so."""
        ...

    def generate(
        self, prompts: Mapping[str, list[int]], params: SamplingParams
    ) -> AsyncGenerator[RequestDelta]:
        """What is new of requests, by id, until all are finished; closing it aborts them."""
        ...
