"""How many drafts pay: expected tokens of a step against its measured time.

Drafts cost time in proposing and scoring them, more so in large batches, and bring tokens only as
far as they are accepted. Both are measured while running, and now and then tried again.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

MEMORY = 0.9  # weight of the past in a running mean
RETRY_STEPS = 50  # until another number of drafts is tried
MARGIN = 1.03  # gain that is worth a change
PRIOR = 0.6  # acceptance assumed before the first draft
FRESH = 2  # measurements before a time is trusted: the first may have compiled something
RECENT = 7  # measurements of which the median counts

log = logging.getLogger("anabranch")


@dataclass(slots=True)
class Mean:
    """A running mean, exact over its first values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        weight = max(1 / self.count, 1 - MEMORY)
        self.value += (value - self.value) * weight


@dataclass(slots=True)
class Times:
    """The median of the last few times, the lower of two: a step that was held up counts little."""

    count: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, ms: float) -> None:
        """One more time."""
        self.count += 1
        self._last.append(ms)

    @property
    def value(self) -> float:
        """Of a step, in milliseconds."""
        return median_low(self._last)


@dataclass(slots=True)
class AdaptiveDrafts:
    """Chooses among a few numbers of drafts, for each size of batch apart."""

    max_drafts: int
    enabled: bool = True
    reason: str = "drafts are being tried"
    _accepted: list[Mean] = field(default_factory=list[Mean])  # given that all before were
    _ms: dict[tuple[int, int], Times] = field(default_factory=dict[tuple[int, int], Times])
    _since_try: int = 0
    _last: int = -1

    def __post_init__(self) -> None:
        self._accepted = [Mean(PRIOR, 1) for _ in range(self.max_drafts)]

    @property
    def choices(self) -> list[int]:
        """Numbers of drafts to choose from."""
        halves = {self.max_drafts >> shift for shift in range(self.max_drafts.bit_length())}
        return sorted({0} | halves)

    def choose(self, batch: int) -> int:
        """How many drafts each sequence of the next step should get at most."""
        if not self.enabled:
            return self.max_drafts
        bucket = batch.bit_length()
        for number in (self.max_drafts, 0):  # times between them are estimated until tried
            if self._measured(bucket, number) is None:
                return number
        best = max(self.choices, key=lambda n: self.gain(bucket, n))
        if self._last in self.choices and best != self._last:
            worth = self.gain(bucket, best) > MARGIN * self.gain(bucket, self._last)
            best = best if worth else self._last
        self._since_try += 1
        if self._since_try >= RETRY_STEPS:
            self._since_try = 0
            others = [n for n in self.choices if n != best]
            return min(others, key=lambda n: self._ms.get((bucket, n), Times()).count)
        if best != self._last:
            self._say(bucket, best)
        self._last = best
        return best

    def observe(self, batch: int, num_drafts: int, ms: float) -> None:
        """A step with up to `num_drafts` drafts a sequence took this long."""
        self._ms.setdefault((batch.bit_length(), num_drafts), Times()).add(ms)

    def count(self, drafted: int, accepted: int) -> None:
        """A sequence had drafts verified."""
        for position in range(min(accepted + 1, drafted)):
            self._accepted[position].add(float(position < accepted))

    def expected_tokens(self, num_drafts: int) -> float:
        """Of a sequence and step."""
        total, reached = 1.0, 1.0
        for mean in self._accepted[:num_drafts]:
            reached *= mean.value
            total += reached
        return total

    def gain(self, bucket: int, num_drafts: int) -> float:
        """Tokens of a sequence in a second."""
        ms = self._time(bucket, num_drafts)
        return 0.0 if ms is None else 1e3 * self.expected_tokens(num_drafts) / max(ms, 1e-6)

    def _measured(self, bucket: int, num_drafts: int) -> float | None:
        times = self._ms.get((bucket, num_drafts))
        return None if times is None or times.count < FRESH else times.value

    def _time(self, bucket: int, num_drafts: int) -> float | None:
        """Measured, or on the line from no drafts to all."""
        measured = self._measured(bucket, num_drafts)
        plain, most = self._measured(bucket, 0), self._measured(bucket, self.max_drafts)
        if measured is not None or plain is None or most is None:
            return measured
        return plain + (most - plain) * num_drafts / self.max_drafts

    def _say(self, bucket: int, best: int) -> None:
        plain, most = self._measured(bucket, 0), self._measured(bucket, self.max_drafts)
        assert plain is not None and most is not None
        what = f"{best} draft{'s' if best > 1 else ''} a step" if best else "speculation off"
        self.reason = (
            f"{what}: {self.max_drafts} drafts give {self.expected_tokens(self.max_drafts):.2f} "
            f"tokens a step for {most / plain:.2f} times the time (batches up to {2**bucket - 1})"
        )
        log.info(self.reason)
