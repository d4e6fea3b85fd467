"""How much a server takes on."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from anabranch.llm.server.errors import ApiError

RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds on single requests and on all of them."""

    max_queue: int = 256  # sequences that wait for a place among those the engine runs
    max_body_bytes: int = 8 << 20
    max_request_seconds: float = 600.0
    max_prompt_tokens: int | None = None  # what the model's context allows, if not given
    max_prompt_logprobs: int = 1 << 18  # of all prompts of a request, each time they are written
    header_seconds: float = 20.0  # for the headers of a request to arrive
    body_seconds: float = 60.0  # for its body to arrive
    max_connections: int = 1024  # one more ends the one that has waited longest for a request

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, got {self.max_queue}")
        for name in ("max_body_bytes", "max_connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prompt_logprobs < 0:
            raise ValueError(
                f"max_prompt_logprobs must be at least 0, got {self.max_prompt_logprobs}"
            )
        for name in ("max_request_seconds", "header_seconds", "body_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")


class SequenceQuota:
    """Counts the sequences that were taken on and are not over."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_open = 0

    @contextmanager
    def admit(self, num_seqs: int) -> Generator[None]:
        """Room for sequences, or an error that says when to come back."""
        if num_seqs > self.capacity:
            raise ApiError(
                400,
                f"the request makes {num_seqs} sequences of its prompts and n; "
                f"this server takes at most {self.capacity}",
            )
        if self.num_open + num_seqs > self.capacity:
            raise ApiError(
                429,
                f"the server is full: {self.num_open} of {self.capacity} sequences are open; "
                f"try again in {RETRY_AFTER_SECONDS} s",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self.num_open += num_seqs
        try:
            yield
        finally:
            self.num_open -= num_seqs
