"""New tokens of a request since the last report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from anabranch.llm.engine.request import Request
from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.sequences.sequence import Sequence as TokenSequence


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


class RequestDelta(NamedTuple):
    """New tokens of a request."""

    request_id: str
    choices: list[ChoiceDelta]  # those that have something new, by number
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs | None] | None  # in the first delta only

    @property
    def num_tokens(self) -> int:
        """New tokens of all continuations."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_logprobs(self) -> int:
        """Logprobs of prompt and tokens: most of the time that writing takes."""
        of_tokens = sum(sum(map(len, choice.logprobs)) for choice in self.choices)
        return of_tokens + sum(len(entry) for entry in self.prompt_logprobs or () if entry)


def join_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """Successive deltas of one request as one, in time linear in their tokens."""
    choices: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        for choice in delta.choices:
            choices.setdefault(choice.number, []).append(choice)
    return RequestDelta(
        deltas[0].request_id,
        [_join_choices(choices[number]) for number in sorted(choices)],
        deltas[-1].finished,
        deltas[0].num_cached_tokens,
        next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
    )


def _join_choices(parts: Sequence[ChoiceDelta]) -> ChoiceDelta:
    if len(parts) == 1:
        return parts[0]
    return ChoiceDelta(
        parts[0].number,
        "".join(part.text for part in parts),
        list(chain.from_iterable(part.token_ids for part in parts)),
        list(chain.from_iterable(part.origins for part in parts)),
        list(chain.from_iterable(part.steps for part in parts)),
        list(chain.from_iterable(part.logprobs for part in parts)),
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


class DeltaCursor:
    """Remembers how much of a request was reported.

    A request that asks for logprobs of its prompt reports nothing until they are complete: its
    first sequence computes them, and others may have tokens before it.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens = [0] * len(request.seqs)
        self._text = [0] * len(request.seqs)
        self._sent_prompt = request.params.prompt_logprobs is None

    def delta(self) -> RequestDelta | None:
        """What is new since the last call; None if it cannot be reported yet."""
        request, first = self._request, self._request.seqs[0]
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if not self._sent_prompt:
            if len(first.prompt_logprobs) < first.prompt_len - 1:
                return None
            prompt_logprobs, self._sent_prompt = [None, *first.prompt_logprobs], True
        return RequestDelta(
            request.request_id,
            [self._choice(seq) for seq in request.seqs if seq.num_output > self._tokens[seq.index]],
            request.finished,
            first.num_cached,
            prompt_logprobs,
        )

    def _choice(self, seq: TokenSequence) -> ChoiceDelta:
        stream = self._request.texts[seq.index]
        text = stream.text if seq.finished else stream.stable_text
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
