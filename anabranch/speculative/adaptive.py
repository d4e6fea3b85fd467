"""How many drafts pay: expected tokens of a step against its measured time.

Drafts cost time in proposing and scoring them, more so in large batches, and bring tokens only as
far as they are accepted. Both are measured while running, and now and then tried again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

MEMORY = 0.9  # weight of the past in a running mean
RETRY_STEPS = 50  # until another number of drafts is tried
MARGIN = 1.03  # gain that is worth a change
PRIOR = 0.6  # acceptance assumed before the first draft
FRESH = 2  # measurements before a time is trusted: the first may have compiled something

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
class AdaptiveDrafts:
    """Chooses among a few numbers of drafts, for each size of batch apart."""

    max_drafts: int
    enabled: bool = True
    reason: str = "drafts are being tried"
    _accepted: list[Mean] = field(default_factory=list[Mean])  # given that all before were
    _ms: dict[tuple[int, int], Mean] = field(default_factory=dict[tuple[int, int], Mean])
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
        untried = [n for n in reversed(self.choices) if self._time(bucket, n) is None]
        if untried:
            return untried[0]
        best = max(self.choices, key=lambda n: self.gain(bucket, n))
        if self._last in self.choices and best != self._last:
            worth = self.gain(bucket, best) > MARGIN * self.gain(bucket, self._last)
            best = best if worth else self._last
        self._since_try += 1
        if self._since_try >= RETRY_STEPS:
            self._since_try = 0
            others = [n for n in self.choices if n != best]
            return min(others, key=lambda n: self._ms[bucket, n].count)
        if best != self._last:
            self._say(bucket, best)
        self._last = best
        return best

    def observe(self, batch: int, num_drafts: int, ms: float) -> None:
        """A step with up to `num_drafts` drafts a sequence took this long."""
        self._ms.setdefault((batch.bit_length(), num_drafts), Mean()).add(ms)

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

    def _time(self, bucket: int, num_drafts: int) -> float | None:
        mean = self._ms.get((bucket, num_drafts))
        return None if mean is None or mean.count < FRESH else mean.value

    def _say(self, bucket: int, best: int) -> None:
        plain, most = self._time(bucket, 0), self._time(bucket, self.max_drafts)
        assert plain is not None and most is not None
        what = f"{best} drafts a step" if best else "speculation off"
        self.reason = (
            f"{what}: {self.max_drafts} drafts give {self.expected_tokens(self.max_drafts):.2f} "
            f"tokens a step for {most / plain:.2f} times the time (batches up to {2**bucket - 1})"
        )
        log.info(self.reason)
