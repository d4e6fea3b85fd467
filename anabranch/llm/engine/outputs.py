"""What a request gives back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.sequences.sequence import Origin


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt, as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the token or string that stopped it; None for eos
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    origins: list[int] = field(default_factory=list[int])  # an Origin for each token
    steps: list[int] = field(default_factory=list[int])  # the engine step that emitted each token

    @property
    def verifications(self) -> list[int]:
        """Tokens of each step that had drafts: one token, if the drafts were all rejected."""
        pairs = zip(self.steps, self.origins, strict=True)
        rejected = {step for step, origin in pairs if origin == Origin.CORRECTED}
        tokens = Counter(self.steps)
        return [count for step, count in tokens.items() if count > 1 or step in rejected]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments of a request, in seconds of `time.monotonic`."""

    arrival: float
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None  # what ended the request, where its finish reasons are "error"
