"""What a request gives back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.sequences.sequence import Origin


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt, as far as it has come."""

    index: int  # among the n of a request
    text: str  # without what may begin a stop string
    token_ids: list[int]  # of the answer
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the token or string that stopped it; None for eos
    logprobs: list[TokenLogprobs] | None = None  # by token id, where asked for
    cumulative_logprob: float | None = None  # their sum over the answer
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

    request_id: str  # of the engine
    prompt: str | None  # as it was given, if as text
    prompt_token_ids: list[int]  # as the model saw them
    outputs: list[CompletionOutput]  # one for each of n
    finished: bool  # whether all of them are
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    num_cached_tokens: int = 0  # of the prompt, found in the cache
    times: RequestTimes | None = None  # of arrival and tokens
    error: str | None = None  # what ended the request, where its finish reasons are "error"
