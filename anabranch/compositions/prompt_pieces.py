"""How prompts over expanded keys are cut: heads into groups of one size, keys into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from anabranch.compositions.prompt_workspace import (
    ExpandedKeys,
    PromptLens,
    Workspace,
    balanced_share,
    choose_workspace,
)
from anabranch.keys import RaggedKV
from anabranch.plan import Plan, make_plan


class KeySpan(NamedTuple):
    """Neighbouring keys of one sequence: those of its context, then those of new tokens."""

    seq: int
    start: int
    stop: int
    context_len: int
    first_token: int  # of the sequence

    @property
    def num_keys(self) -> int:
        return self.stop - self.start


class PromptCall(NamedTuple):
    """Tokens that attend to the keys of a piece, by bounds in the layout's index."""

    tokens: slice
    q_bounds: slice
    k_bounds: slice
    causal: bool
    is_first: bool  # no other piece has been attended to


class PromptPiece(NamedTuple):
    """Keys that are expanded at once: of whole sequences, or a part of one."""

    spans: list[KeySpan]
    calls: list[PromptCall]
    places: slice  # of its spans in the layout's index, as expand_pages() reads them

    @property
    def num_keys(self) -> int:
        return sum(span.num_keys for span in self.spans)


@dataclass(slots=True, eq=False)
class PromptLayout:
    """How a prompt is cut, for every layer of a step that has the same lengths and shapes."""

    lens: PromptLens
    num_heads: int  # of keys, expanded at once
    pieces: list[PromptPiece]
    index: torch.Tensor  # int32: where the sequences of every call begin, and the spans of pieces
    fused_merge: bool | None  # as in make_plan
    cuts_blocks: bool  # plans have room for parts, so only one of them is kept
    _plans: dict[int, Plan] = field(default_factory=dict[int, Plan])  # by a call's place in index

    def check(self, lens: PromptLens, keys: ExpandedKeys) -> None:
        """Refuse lengths or heads that it was not made for."""
        if lens != self.lens:
            raise ValueError(f"the layout was made for {self.lens}, got {lens}")
        if keys.num_heads % self.num_heads:
            raise ValueError(
                f"the layout was made for groups of {self.num_heads} heads, "
                f"got {keys.num_heads} heads"
            )

    def plan(
        self, call: PromptCall, q: torch.Tensor, source: RaggedKV, starts: torch.Tensor
    ) -> Plan | None:
        """The plan of a call, for all groups of heads and, unless it is replaced, all layers."""
        if q.device.type == "cpu":
            return None
        plan = self._plans.get(call.q_bounds.start)
        if plan is None:
            if self.cuts_blocks:
                self._plans.clear()
            options: Any = {"causal": call.causal, "fused_merge": self.fused_merge}
            options["window"] = self.lens.window
            plan = make_plan(q, source, cu_seqlens_q=starts, **options)
            self._plans[call.q_bounds.start] = plan
        return plan


def make_prompt_layout(
    keys: ExpandedKeys,
    *,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None = None,
    max_workspace_mib: float = 256,
    fused_merge: bool | None = None,
) -> PromptLayout:
    """Cut prompts over such keys so that what is allocated stays within the budget."""
    lens = PromptLens(tuple(q_lens), tuple(context_lens), window)
    space = choose_workspace(keys, lens, max_workspace_mib, fused_merge)
    return cut_prompts(lens, space, keys.device, fused_merge)


def cut_prompts(
    lens: PromptLens, space: Workspace, device: torch.device, fused_merge: bool | None = None
) -> PromptLayout:
    """Cut prompts into what is handled at once."""
    cutter = PieceCutter(lens, space)
    pieces = list(cutter.pieces())
    index = torch.tensor(cutter.index, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = index.to(device, non_blocking=True)
    return PromptLayout(lens, space.num_heads, pieces, on_device, fused_merge, space.cuts_blocks)


class PieceCutter:
    """Cuts the keys of sequences into pieces, and collects the numbers that these need."""

    def __init__(self, lens: PromptLens, space: Workspace) -> None:
        self.index: list[int] = []  # of all calls and pieces, each from a multiple of 16 bytes on
        self._space = space
        self._lens = lens

    def pieces(self) -> Iterator[PromptPiece]:
        """Short sequences together, longer ones in pieces of their own."""
        together: list[KeySpan] = []
        room = self._space.num_keys
        for whole in self._sequences():
            if together and whole.num_keys > room:
                yield self._whole(together)
                together, room = [], self._space.num_keys
            if whole.num_keys <= room:
                together.append(whole)
                room -= whole.num_keys
            elif self._lens.window is None:
                yield from self._parts(whole)
            else:
                yield from (self._whole([span]) for span in self._windows(whole))
        if together:
            yield self._whole(together)

    def _sequences(self) -> Iterator[KeySpan]:
        """All keys that the new tokens of a sequence see, for those that have some."""
        lens, firsts = self._lens, accumulate(self._lens.q_lens, initial=0)
        each = zip(lens.q_lens, lens.context_lens, firsts, strict=False)
        for seq, (q_len, context_len, first) in enumerate(each):
            if q_len:
                start = lens.first_key(context_len)
                yield KeySpan(seq, start, context_len + q_len, context_len, first)

    def _windows(self, whole: KeySpan) -> Iterator[KeySpan]:
        """Shares of a sequence's tokens, each with all keys that it sees."""
        seq, _, stop, context_len, first_token = whole
        step = balanced_share(stop - context_len, self._space.num_keys - self._lens.overlap)
        for place in range(context_len, stop, step):
            start, end = self._lens.first_key(place), min(place + step, stop)
            yield KeySpan(seq, start, end, place, first_token + place - context_len)

    def _whole(self, spans: list[KeySpan]) -> PromptPiece:
        q_bounds = [0, *accumulate(span.stop - span.context_len for span in spans)]
        k_bounds = [0, *accumulate(span.num_keys for span in spans)]
        first = spans[0].first_token
        tokens = slice(first, first + q_bounds[-1])
        return self._piece(spans, [self._call(tokens, q_bounds, k_bounds, True, True)])

    def _piece(self, spans: list[KeySpan], calls: list[PromptCall]) -> PromptPiece:
        stops = [*accumulate(span.num_keys for span in spans)]
        skipped = [span.stop - stop for span, stop in zip(spans, stops, strict=True)]
        return PromptPiece(spans, calls, self._add([*stops, *(x.seq for x in spans), *skipped]))

    def _parts(self, whole: KeySpan) -> Iterator[PromptPiece]:
        count = -(-whole.stop // self._space.num_keys)
        for part in range(count):
            start, stop = (whole.stop * i // count for i in (part, part + 1))
            yield self._part(whole._replace(start=start, stop=stop), whole.stop)

    def _part(self, span: KeySpan, k_len: int) -> PromptPiece:
        """The tokens of a span see it causally, later ones all of it."""
        origin = span.first_token - span.context_len  # the token of key 0
        calls: list[PromptCall] = []
        is_first = span.start == 0
        most = k_len if is_first else self._space.num_queries
        for causal, start, stop in ((True, span.start, span.stop), (False, span.stop, k_len)):
            first, last = max(start, span.context_len), max(stop, span.context_len)
            step = max(balanced_share(last - first, most), 1)
            for place in range(first, last, step):
                end = min(place + step, last)
                num_keys = (end if causal else span.stop) - span.start
                tokens = slice(origin + place, origin + end)
                bounds = [0, end - place], [0, num_keys]
                calls.append(self._call(tokens, *bounds, causal, is_first))
        return self._piece([span], calls)

    def _call(
        self, tokens: slice, q_bounds: list[int], k_bounds: list[int], causal: bool, is_first: bool
    ) -> PromptCall:
        return PromptCall(tokens, self._add(q_bounds), self._add(k_bounds), causal, is_first)

    def _add(self, bounds: Sequence[int]) -> slice:
        place = slice(len(self.index), len(self.index) + len(bounds))
        self.index += [*bounds, *[0] * (-len(bounds) % 4)]
        return place
