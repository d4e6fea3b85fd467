"""What is new of a request since it was last told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from anabranch.engine.outputs import TokenLogprobs
from anabranch.engine.request import Request
from anabranch.engine.sequence import Sequence


class ChoiceDelta(NamedTuple):
    """New tokens of one continuation, and why it ended."""

    number: int  # among the n of a request
    text: str
    token_ids: list[int]
    origins: list[int]
    steps: list[int]
    logprobs: list[TokenLogprobs]  # empty if not asked for
    finish_reason: str | None
    stop_reason: int | str | None

    def join(self, later: ChoiceDelta) -> ChoiceDelta:
        """Both, as one."""
        return ChoiceDelta(
            self.number,
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.origins + later.origins,
            self.steps + later.steps,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.stop_reason,
        )


class RequestDelta(NamedTuple):
    """New tokens of a request."""

    request_id: str
    choices: list[ChoiceDelta]  # those that have something new, by number
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None  # told once

    def join(self, later: RequestDelta) -> RequestDelta:
        """Both, as one."""
        choices = {choice.number: choice for choice in self.choices}
        for choice in later.choices:
            before = choices.get(choice.number)
            choices[choice.number] = before.join(choice) if before else choice
        return RequestDelta(
            self.request_id,
            [choices[number] for number in sorted(choices)],
            later.finished,
            self.num_cached_tokens,
            self.prompt_logprobs or later.prompt_logprobs,
        )

    @property
    def num_tokens(self) -> int:
        """New tokens of all continuations."""
        return sum(len(choice.token_ids) for choice in self.choices)


def pack(deltas: Iterable[RequestDelta]) -> list[tuple[Any, ...]]:
    """As plain tuples, which pickle six times faster: the engine's process has better to do."""
    return [(name, [tuple(choice) for choice in choices], *more) for name, choices, *more in deltas]


def unpack(packed: Iterable[tuple[Any, ...]]) -> list[RequestDelta]:
    """What was packed."""
    return [
        RequestDelta(name, [ChoiceDelta._make(choice) for choice in choices], *more)
        for name, choices, *more in packed
    ]


class Teller:
    """Remembers how much of a request was told."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens = [0] * len(request.seqs)
        self._text = [0] * len(request.seqs)
        self._told_prompt = request.params.prompt_logprobs is None

    def delta(self) -> RequestDelta:
        """What is new, told once."""
        request = self._request
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if not self._told_prompt:  # the first continuation computes them, and begins first
            first = request.seqs[0]
            prompt_logprobs, self._told_prompt = [None, *first.prompt_logprobs], True
        return RequestDelta(
            request.request_id,
            [self._choice(seq) for seq in request.seqs if seq.num_output > self._tokens[seq.index]],
            request.finished,
            request.seqs[0].num_cached,
            prompt_logprobs,
        )

    def _choice(self, seq: Sequence) -> ChoiceDelta:
        stream = self._request.texts[seq.index]
        text = stream.text if seq.finished else stream.shown
        since, shown = self._tokens[seq.index], self._text[seq.index]
        self._tokens[seq.index], self._text[seq.index] = seq.num_output, len(text)
        return ChoiceDelta(
            seq.index,
            text[shown:],
            seq.tokens[seq.prompt_len + since :],
            [int(origin) for origin in seq.origins[since:]],
            seq.steps[since:],
            seq.logprobs[since:],
            seq.finish_reason,
            seq.stop_reason,
        )
