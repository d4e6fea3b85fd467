"""What became of one request: when its tokens arrived, or why they did not."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind that is counted, and an example of what was said."""

    kind: str
    said: str


@dataclass(slots=True)
class Outcome:
    """Moments are seconds of one clock."""

    start: float
    arrivals: list[float] = field(default_factory=list[float])  # of chunks with tokens
    end: float = 0.0  # the last chunk of the answer, or the failure
    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    failure: Failure | None = None
    left: bool = False  # the client went before the end

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.start

    @property
    def latency(self) -> float:
        """Time to the last."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first; None of a single token."""
        if self.num_output < 2:
            return None
        return (self.latency - self.ttft) / (self.num_output - 1)

    @property
    def itls(self) -> list[float]:
        """Times between arrivals; several tokens may arrive at once."""
        return [b - a for a, b in pairwise(self.arrivals)]
