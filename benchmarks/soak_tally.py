"""What clients of a server saw, and when its engine was away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

KILL_SECONDS = 1.0  # after an engine was found dead in which requests count as in flight


@dataclass
class Outage:
    """From the harm done to an engine until another one answers."""

    begin: float  # seconds of time.monotonic
    noticed: float = float("inf")
    end: float = float("inf")


@dataclass
class Tally:
    """Of one server."""

    answered: int = 0
    in_flight: int = 0  # failed, and open when an engine was found dead
    lost: list[str] = field(default_factory=list)
    asked: list[tuple[float, float]] = field(default_factory=list)  # begin and end of two tokens
    attacks: Counter[str] = field(default_factory=Counter)  # by kind and status
    broken: list[str] = field(default_factory=list)  # answers to attackers that are no refusal
    read: int = 0  # answers that slow readers read to their end
    outages: list[Outage] = field(default_factory=list)

    def in_flight_at(self, start: float, end: float) -> bool:
        """Whether a request was open when an engine was found dead."""
        return any(
            start <= outage.noticed + KILL_SECONDS and end >= outage.begin
            for outage in self.outages
        )

    def was_away(self, start: float, end: float) -> bool:
        """Whether there was no engine for a part of this time."""
        return any(
            start <= outage.end + KILL_SECONDS and end >= outage.begin for outage in self.outages
        )

    @property
    def two_tokens(self) -> list[float]:
        """Seconds that a bystander waited for two tokens, outages apart."""
        return [end - start for start, end in self.asked if not self.was_away(start, end)]

    def count(self, wrong: str | None, start: float, end: float) -> None:
        """A request that had to be answered."""
        if wrong is None:
            self.answered += 1
        elif self.in_flight_at(start, end):
            self.in_flight += 1
        else:
            self.lost.append(wrong)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value that so many percent do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)], 3)
