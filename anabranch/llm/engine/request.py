"""A request: one prompt, n continuations, and their progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from anabranch.llm.engine.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestTimes,
)
from anabranch.llm.engine.text_stream import TextStream
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.sequences.sequence import Sequence


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
