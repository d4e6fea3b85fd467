"""Counts and times of an engine since it started."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculativeStats:
    """What drafting brought."""

    num_drafts: int = 0  # verifications of a sequence's drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0  # the accepted ones and one more
    num_max_tokens: int = 0  # what would have been emitted had all drafts been right
    drafted_at: list[int] = field(default_factory=list[int])  # by position, once for siblings
    accepted_at: list[int] = field(default_factory=list[int])

    def count(
        self, drafted: int, accepted: int, max_drafts: int, *, deepest: int | None = None
    ) -> None:
        """One sequence was verified, whose tree of drafts is so deep; None for a chain."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_emitted_tokens += accepted + 1
        self.num_max_tokens += max_drafts + 1
        for counts, number in ((self.drafted_at, deepest or drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (max_drafts - len(counts)))
            for position in range(number):
                counts[position] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def system_efficiency(self) -> float:
        """Emitted tokens / those that steps would emit at most."""
        return self.num_emitted_tokens / max(self.num_max_tokens, 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted by a verification, on average."""
        return self.num_emitted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at each position that were accepted."""
        return [a / max(d, 1) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]


@dataclass(slots=True)
class EngineStats:
    """Read by the tools and by a server's metrics."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed, not found in the cache
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_graph_steps: int = 0
    num_saturated: int = 0  # elements of keys and values that a quantised cache could not hold
    num_nan_rows: int = 0  # output tokens that had a NaN among their logits
    stage_ms: dict[str, float] = field(default_factory=dict[str, float])  # sums by stage
    # sums of what the host does beside them: "masks", and "waiting" for the device
    host_ms: dict[str, float] = field(default_factory=dict[str, float])
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)

    def count_saturated(self, counter: int) -> None:
        """Of a counter of 32 bits that wraps around."""
        self.num_saturated += (counter - self.num_saturated) % (1 << 32)

    def add_times(self, times: dict[str, float]) -> None:
        _add(times, self.stage_ms)

    def add_host_times(self, times: dict[str, float]) -> None:
        _add(times, self.host_ms)


def _add(times: dict[str, float], sums: dict[str, float]) -> None:
    for name, taken in times.items():
        sums[name] = sums.get(name, 0.0) + taken
