"""A request: one prompt, n continuations, the tokens that arrive, and what it gives back."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.sampling.batch import HostLogprobs
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import TokenLogprobs, sampled_entry
from anabranch.llm.sequences.sequence import Origin, Sequence


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


@dataclass(slots=True, eq=False)
class Request:
    """What the engine keeps of a request until it is over."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seqs: list[Sequence]
    texts: list[TextStream]
    arrival: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    error: str | None = None  # what went wrong with this request and with no other

    @property
    def finished(self) -> bool:
        return all(seq.finished for seq in self.seqs)

    @property
    def num_output(self) -> int:
        return sum(seq.num_output for seq in self.seqs)

    def output(self) -> RequestOutput:
        first = self.seqs[0]
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *first.prompt_logprobs]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[self._completion(seq) for seq in self.seqs],
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached,
            times=RequestTimes(self.arrival, self.first_token, self.last_token),
            error=self.error,
        )

    def _completion(self, seq: Sequence) -> CompletionOutput:
        stream = self.texts[seq.index]
        tokens = seq.output
        logprobs = list(seq.logprobs) if self.params.logprobs is not None else None
        total = None
        if logprobs is not None:
            pairs = zip(tokens, logprobs, strict=True)
            total = sum(entry[token].logprob for token, entry in pairs)
        return CompletionOutput(
            index=seq.index,
            text=stream.text if seq.finished else stream.stable_text,
            token_ids=tokens,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=total,
            origins=[int(origin) for origin in seq.origins],
            steps=list(seq.steps),
        )


def arrive(
    request: Request,
    seq: Sequence,
    tokens: list[int],
    *,
    rejects: bool,  # the last token stands where drafts were rejected
    step: int,
    logprobs: HostLogprobs | None,
) -> int:
    """Add tokens until one stops the sequence; how many were added."""
    request.last_token = time.monotonic()
    request.first_token = request.first_token or request.last_token
    last = Origin.CORRECTED if rejects else Origin.SAMPLED
    for place, token in enumerate(tokens):
        if logprobs is not None and seq.params.logprobs is not None:  # first: it may fail
            seq.logprobs.append(sampled_entry(token, logprobs, place, seq.params.logprobs))
        seq.tokens.append(token)
        if seq.rules is not None:
            seq.rules.accept(token)
        seq.steps.append(step)
        accepted = place + 1 < len(tokens)
        seq.origins.append(Origin.ACCEPTED if accepted else last)
        if _stops(request, seq, token):
            return place + 1
    return len(tokens)


def _stops(request: Request, seq: Sequence, token: int) -> bool:
    stream, params, num_output = request.texts[seq.index], seq.params, seq.num_output
    early = num_output < params.min_tokens
    if token in seq.stop_ids and not early:
        seq.finish_reason = "stop"
        if token in params.stop_token_ids:
            seq.stop_reason = token
    written = params.include_stop_str_in_output or not params.skip_special_tokens
    if seq.finish_reason is None or written:
        stopped = stream.push(token, may_stop=not early and seq.finish_reason is None)
        if stopped:
            seq.finish_reason, seq.stop_reason = "stop", stream.stopped_by
    if seq.finish_reason is None and seq.rules is not None and seq.rules.over:
        seq.finish_reason = "stop"
    if seq.finish_reason is None and num_output >= seq.max_tokens:
        seq.finish_reason = "length"
    return seq.finished
