"""How many drafts pay: expected tokens of a step against its measured time.

Drafts cost time in proposing and scoring them, more so in large batches, and bring tokens only as
far as they are accepted. Both are measured while running, and now and then tried again. What
counts is what was asked for: asking costs time even if no drafts come of it, since a step that may
have drafts waits for the tokens of the one before it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median_low

MEMORY = 0.9  # weight of the past in a running mean
RETRY_STEPS = 64  # until another number of drafts is tried
TRIAL_STEPS = 3  # that it is tried for; the first does not count
MARGIN = 1.03  # gain that is worth a change
PRIOR = 0.6  # acceptance assumed before the first draft
FRESH = 2  # measurements before a time is trusted: the first may have compiled something
RECENT = 9  # measurements that count
HELD_UP = 10  # times the median: such a step says nothing about the next

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
    """The mean of the last few times, but for steps that were held up.

    Not their median: when few of the steps that may have drafts get any, these must count.
    """

    count: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, ms: float) -> None:
        """One more time."""
        self.count += 1
        self._last.append(ms)

    @property
    def value(self) -> float:
        """Of a step, in milliseconds."""
        most = HELD_UP * median_low(self._last)
        return fmean(ms for ms in self._last if ms <= most)


def draft_numbers(max_drafts: int) -> list[int]:
    """Numbers of drafts worth a choice: the most, its halves, and none."""
    halves = {max_drafts >> shift for shift in range(max_drafts.bit_length())}
    return sorted({0} | halves)


@dataclass(slots=True)
class AdaptiveDrafts:
    """Chooses among a few numbers of drafts, for each size of batch apart."""

    max_drafts: int
    enabled: bool = True
    reason: str = "drafts are being tried"
    _accepted: list[Mean] = field(default_factory=list[Mean])  # given that all before were
    _ms: dict[tuple[int, int], Times] = field(default_factory=dict[tuple[int, int], Times])
    _since_try: int = 0
    _trial: int = 0
    _trial_left: int = 0
    _last: int = -1
    _before: int = -1  # drafts asked for in the step before

    def __post_init__(self) -> None:
        self._accepted = [Mean(PRIOR, 1) for _ in range(self.max_drafts)]

    @property
    def choices(self) -> list[int]:
        """Numbers of drafts to choose from."""
        return draft_numbers(self.max_drafts)

    def choose(self, batch: int) -> int:
        """How many drafts each sequence of the next step should get at most."""
        if not self.enabled:
            return self.max_drafts
        bucket = batch.bit_length()
        for number in (self.max_drafts, 0):  # times between them are estimated until tried
            if self._measured(bucket, number) is None:
                return number
        if self._trial_left:
            self._trial_left -= 1
            return self._trial
        best = max(self.choices, key=lambda n: self.gain(bucket, n))
        if self._last in self.choices and best != self._last:
            worth = self.gain(bucket, best) > MARGIN * self.gain(bucket, self._last)
            best = best if worth else self._last
        self._since_try += 1
        if self._since_try >= RETRY_STEPS:
            self._since_try = 0
            others = [n for n in self.choices if n != best]
            self._trial = min(others, key=lambda n: self._ms.get((bucket, n), Times()).count)
            self._trial_left = TRIAL_STEPS - 1
            return self._trial
        if best != self._last:
            self._say(bucket, best)
        self._last = best
        return best

    def observe(self, batch: int, num_drafts: int, ms: float) -> None:
        """A step for which `num_drafts` drafts a sequence were asked took this long.

        The first after a change is not like those that follow it. A draft model catches up with
        tokens it was not asked about, some RETRY_STEPS of a sequence; and without drafts, only from
        the second step on does the host work on one while the device works on the next.
        """
        if num_drafts == self._before:
            self._ms.setdefault((batch.bit_length(), num_drafts), Times()).add(ms)
        self._before = num_drafts

    def count(self, asked: int, accepted: int) -> None:
        """A sequence was asked for drafts; one that was not made is one not accepted."""
        for position in range(min(accepted + 1, asked)):
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
