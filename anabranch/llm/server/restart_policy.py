"""How often an engine is started again, and after which delays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine is started again before it is given up."""

    max_restarts: int = 3  # within `window_seconds`; 0 gives the engine up at its first end
    first_delay: float = 1.0  # seconds before the first restart; each further one waits twice that
    window_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must be at least 0, got {self.max_restarts}")
        if self.first_delay < 0 or self.window_seconds <= 0:
            raise ValueError(
                f"first_delay must be at least 0 and window_seconds above 0, "
                f"got {self.first_delay} and {self.window_seconds}"
            )


class RestartBudget:
    """Counts the ends of an engine."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._ends: deque[float] = deque()  # seconds, as they were given

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait after an end at `now`; None when there were too many."""
        policy = self._policy
        self._ends.append(now)
        while now - self._ends[0] > policy.window_seconds:
            self._ends.popleft()
        if len(self._ends) > policy.max_restarts:
            return None
        return policy.first_delay * 2 ** (len(self._ends) - 1)
