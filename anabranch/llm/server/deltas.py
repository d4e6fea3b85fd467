"""New tokens of a request since the last report: found, packed for a pipe, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from anabranch.llm.engine.request import Request
from anabranch.llm.sampling.token_logprobs import Logprob, TokenLogprobs
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


class LogprobColumns(NamedTuple):
    """Logprobs of successive tokens."""

    sizes: list[int]  # of each entry; 0 where there is none
    tokens: list[int]
    logprobs: list[float]
    ranks: list[int]


def pack(deltas: Iterable[RequestDelta]) -> list[tuple[Any, ...]]:
    """Plain tuples, with logprobs in columns: objects of classes take microseconds to pickle."""
    return [
        (name, [_pack_choice(choice) for choice in choices], *more, _columns(prompt_logprobs))
        for name, choices, *more, prompt_logprobs in deltas
    ]


def unpack(packed: Iterable[tuple[Any, ...]]) -> list[RequestDelta]:
    return [
        RequestDelta._make(
            (name, [_unpack_choice(choice) for choice in choices], *more, _entries(scored))
        )
        for name, choices, *more, scored in packed
    ]


def _pack_choice(choice: ChoiceDelta) -> tuple[Any, ...]:
    *fields, logprobs, finish_reason, stop_reason = choice
    return *fields, _columns(logprobs or None), finish_reason, stop_reason


def _unpack_choice(packed: tuple[Any, ...]) -> ChoiceDelta:
    *fields, columns, finish_reason, stop_reason = packed
    return ChoiceDelta._make((*fields, _entries(columns) or [], finish_reason, stop_reason))


def _columns(entries: Sequence[TokenLogprobs | None] | None) -> LogprobColumns | None:
    if entries is None:
        return None
    known = [entry for entry in entries if entry]
    return LogprobColumns(
        [len(entry or ()) for entry in entries],
        [token for entry in known for token in entry],
        [item.logprob for entry in known for item in entry.values()],
        [item.rank for entry in known for item in entry.values()],
    )


def _entries(columns: LogprobColumns | None) -> Any:
    if columns is None:
        return None
    sizes, *values = columns
    pairs = ((token, Logprob(value, rank)) for token, value, rank in zip(*values, strict=True))
    return [dict(islice(pairs, size)) or None for size in sizes]


class DeltaListener:
    """A mailbox on the event loop's thread. A slow reader gets several deltas as one."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.open = set(request_ids)
        self._unread: dict[str, list[RequestDelta]] = {}
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        self._unread.setdefault(delta.request_id, []).append(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def next(self) -> list[RequestDelta]:
        """Everything unread, one delta for each request."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        unread, self._unread = self._unread, {}
        return [join_deltas(deltas) for deltas in unread.values()]
