"""How many drafts pay: expected tokens of a step against its measured time.

Drafts cost time in proposing and scoring them, more so in large batches, and bring tokens only as
far as they are accepted. Both are measured while running, and tried again at intervals. Times
are kept by the number of drafts requested: a request costs time even if it finds no drafts, since
a step that may have drafts waits for the tokens of the one before it.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field

MEMORY = 0.9  # weight of the past in a running mean
RETRY_STEPS = 64  # until another number of drafts is tried
TRIAL_STEPS = 3  # that it is tried for; the first does not count
MARGIN = 1.03  # gain that is worth more drafts
LOSS = 1.01  # loss that fewer drafts are worth
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
        self.count += 1
        weight = max(1 / self.count, 1 - MEMORY)
        self.value += (value - self.value) * weight


@dataclass(slots=True)
class Times:
    """The mean of the last few times, without steps that were held up.

    A mean, so that rare steps with drafts count.
    """

    count: int = 0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, ms: float) -> None:
        self.count += 1
        self._last.append(ms)

    @property
    def value(self) -> float:
        """Milliseconds of a step."""
        ordered = sorted(self._last)
        most = HELD_UP * ordered[(len(ordered) - 1) // 2]
        kept = [ms for ms in ordered if ms <= most]
        return sum(kept) / len(kept)


@dataclass(slots=True)
class Situation:
    """Steps that are alike: batches of about one size, with or without prompts among them."""

    times: defaultdict[int, Times] = field(default_factory=lambda: defaultdict(Times))  # by drafts
    since_try: int = 0
    trial: int = 0
    trial_left: int = 0
    chosen: int | None = None
    before: int | None = None  # drafts requested in the step before

    def observe(self, num_drafts: int, ms: float) -> None:
        """One more step; the first after a change is not like those that follow it."""
        if num_drafts == self.before:
            self.times[num_drafts].add(ms)
        self.before = num_drafts

    def measured(self, num_drafts: int) -> float | None:
        """Milliseconds of a step, if there were enough of them."""
        times = self.times[num_drafts]
        return None if times.count < FRESH else times.value


def draft_numbers(max_drafts: int) -> list[int]:
    """Numbers of drafts worth a choice: the most, its halves, and none."""
    halves = {max_drafts >> shift for shift in range(max_drafts.bit_length())}
    return sorted({0} | halves)


@dataclass(slots=True)
class AdaptiveDrafts:
    """Chooses among a few numbers of drafts, for each situation apart."""

    max_drafts: int
    enabled: bool = True
    has_trees: bool = False  # the drafts of a step do not all follow each other
    reason: str = "drafts are being tried"
    _accepted: list[Mean] = field(default_factory=list[Mean])  # given that all before were
    _grown: dict[int, Mean] = field(default_factory=dict[int, Mean])  # accepted of trees, by size
    _situations: dict[tuple[int, bool], Situation] = field(
        default_factory=dict[tuple[int, bool], Situation]
    )

    def __post_init__(self) -> None:
        self._accepted = [Mean(PRIOR, 1) for _ in range(self.max_drafts)]

    @property
    def choices(self) -> list[int]:
        return draft_numbers(self.max_drafts)

    def choose(self, batch: int, *, with_prompts: bool = False) -> int:
        """How many drafts each sequence of the next step should get at most."""
        if not self.enabled:
            return self.max_drafts
        here = self._situation(batch, with_prompts)
        for number in (self.max_drafts, 0):  # times between them are estimated until tried
            if here.measured(number) is None:
                return number
        if here.trial_left:
            here.trial_left -= 1
            return here.trial
        best = self._best(here)
        here.since_try += 1
        if here.since_try >= RETRY_STEPS:
            here.since_try = 0
            others = [number for number in self.choices if number != best]
            here.trial = min(others, key=lambda number: here.times[number].count)
            here.trial_left = TRIAL_STEPS - 1
            return here.trial
        if best != here.chosen:
            self._explain(here, best, batch, with_prompts)
        here.chosen = best
        return best

    def observe(
        self, batch: int, num_drafts: int, ms: float, *, with_prompts: bool = False
    ) -> None:
        """A step for which `num_drafts` drafts a sequence were requested took this long.

        The first after a change does not count. A draft model catches up with tokens it was not
        asked about, some RETRY_STEPS of a sequence; and without drafts, only from the second step
        on does the host work on one while the device works on the next.
        """
        self._situation(batch, with_prompts).observe(num_drafts, ms)

    def count(self, wanted: int, accepted: int, room: int) -> None:
        """Drafts were requested for a sequence; one that was not found counts as rejected.

        Drafts deeper than `room` are not made; trees that may be cut by it do not count.
        """
        if self.has_trees:
            if wanted <= room:
                self._grown.setdefault(wanted, Mean()).add(accepted)
            return
        wanted = min(wanted, room)
        for position in range(min(accepted + 1, wanted)):
            self._accepted[position].add(float(position < accepted))

    def expected_tokens(self, num_drafts: int) -> float:
        """Expected tokens of a sequence in a step."""
        if self.has_trees:
            return 1.0 + self._expected_of_trees(num_drafts)
        total, reached = 1.0, 1.0
        for mean in self._accepted[:num_drafts]:
            reached *= mean.value
            total += reached
        return total

    def _expected_of_trees(self, num_drafts: int) -> float:
        """Accepted drafts; of sizes that were not tried, in proportion to the largest."""
        if not num_drafts:
            return 0.0
        most = self._grown.get(self.max_drafts, Mean(PRIOR))
        measured = self._grown.get(num_drafts)
        return most.value * num_drafts / self.max_drafts if measured is None else measured.value

    def gain(self, batch: int, num_drafts: int, *, with_prompts: bool = False) -> float:
        """Tokens of a sequence in a second."""
        return self._gain(self._situation(batch, with_prompts), num_drafts)

    def _situation(self, batch: int, with_prompts: bool) -> Situation:
        return self._situations.setdefault((batch.bit_length(), with_prompts), Situation())

    def _best(self, here: Situation) -> int:
        gains = {number: self._gain(here, number) for number in self.choices}
        best = max(gains, key=gains.__getitem__)
        if here.chosen is None:
            return best
        enough = [n for n, gain in gains.items() if n < here.chosen and gain * LOSS >= gains[best]]
        if enough:
            return enough[0]
        return best if gains[best] > MARGIN * gains[here.chosen] else here.chosen

    def _gain(self, here: Situation, num_drafts: int) -> float:
        ms = self._time(here, num_drafts)
        return 0.0 if ms is None else 1e3 * self.expected_tokens(num_drafts) / max(ms, 1e-6)

    def _time(self, here: Situation, num_drafts: int) -> float | None:
        """Milliseconds of a step with so many drafts: no fewer than with fewer drafts.

        Beside prompts of any size, times vary; without this bound, drafts would seem free by luck.
        """
        plain, most = here.measured(0), here.measured(self.max_drafts)
        if plain is None or most is None:
            return here.measured(num_drafts)
        fewer = [number for number in self.choices if number <= num_drafts]
        line = [plain + (most - plain) * number / self.max_drafts for number in fewer]
        found = [here.measured(number) for number in fewer]
        return max(on if ms is None else ms for ms, on in zip(found, line, strict=True))

    def _explain(self, here: Situation, best: int, batch: int, with_prompts: bool) -> None:
        plain, most = self._time(here, 0), self._time(here, self.max_drafts)
        assert plain is not None and most is not None
        what = f"{best} draft{'s' if best > 1 else ''} a step" if best else "speculation off"
        beside = ", beside prompts" if with_prompts else ""
        self.reason = (
            f"{what}: {self.max_drafts} drafts give {self.expected_tokens(self.max_drafts):.2f} "
            f"tokens a step for {most / plain:.2f} times the time "
            f"(batches up to {2 ** batch.bit_length() - 1}{beside})"
        )
        log.info(self.reason)
