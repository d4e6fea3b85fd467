"""How prompts over latent rows are cut: heads into groups of one size, keys into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from anabranch.compositions.prompt_workspace import (
    PromptLens,
    Workspace,
    balanced_share,
    choose_workspace,
)
from anabranch.compositions.up_projection import UpProjection
from anabranch.keys import RaggedKV
from anabranch.plan import Plan, make_plan


class KeySpan(NamedTuple):
    """Neighbouring keys of one sequence: rows of its context, then those of new tokens."""

    seq: int
    start: int
    stop: int
    context_len: int
    first_token: int  # of the sequence


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


@dataclass(slots=True, eq=False)
class PromptLayout:
    """How a prompt is cut, for every layer of a step that has the same lengths and shapes."""

    lens: PromptLens
    num_heads: int  # expanded at once
    pieces: list[PromptPiece]
    index: torch.Tensor  # int32: where the sequences of every call begin
    fused_merge: bool | None  # as in make_plan
    cuts_blocks: bool  # plans have room for parts, so only one of them is kept
    _plans: dict[int, Plan] = field(default_factory=dict[int, Plan])  # by a call's place in index

    def check(self, lens: PromptLens, num_heads: int) -> None:
        """Refuse lengths or heads that it was not made for."""
        if lens != self.lens:
            raise ValueError(f"the layout was made for {self.lens}, got {lens}")
        if num_heads % self.num_heads:
            raise ValueError(
                f"the layout was made for groups of {self.num_heads} heads, got {num_heads} heads"
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
            plan = make_plan(q, source, cu_seqlens_q=starts, **options)
            self._plans[call.q_bounds.start] = plan
        return plan


def make_prompt_layout(
    up: UpProjection,
    width: int,
    *,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    page_size: int,
    max_workspace_mib: float = 256,
    fused_merge: bool | None = None,
) -> PromptLayout:
    """Cut prompts over rows of this width so that what is allocated stays within the budget."""
    lens = PromptLens(tuple(q_lens), tuple(context_lens))
    space = choose_workspace(up, width, lens, page_size, max_workspace_mib, fused_merge)
    cutter = PieceCutter(lens, space)
    pieces = list(cutter.pieces())
    device = up.weight.device
    index = torch.tensor(cutter.index, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = index.to(device, non_blocking=True)
    return PromptLayout(lens, space.num_heads, pieces, on_device, fused_merge, space.cuts_blocks)


class PieceCutter:
    """Cuts the keys of sequences into pieces, and collects the bounds that their calls need."""

    def __init__(self, lens: PromptLens, space: Workspace) -> None:
        self.index: list[int] = []  # bounds of all calls, each at a multiple of 16 bytes
        self._space = space
        self._lens = lens

    def pieces(self) -> Iterator[PromptPiece]:
        """Short sequences together, longer ones in pieces of their own."""
        together: list[KeySpan] = []
        firsts = accumulate(self._lens.q_lens, initial=0)
        room = self._space.num_keys
        for seq, (q_len, context_len, first) in enumerate(zip(*self._lens, firsts, strict=False)):
            if not q_len:
                continue
            whole = KeySpan(seq, 0, context_len + q_len, context_len, first)
            if together and whole.stop > room:
                yield self._whole(together)
                together, room = [], self._space.num_keys
            if whole.stop > room:
                yield from self._parts(whole)
            else:
                together.append(whole)
                room -= whole.stop
        if together:
            yield self._whole(together)

    def _whole(self, spans: list[KeySpan]) -> PromptPiece:
        q_bounds = [0, *accumulate(span.stop - span.context_len for span in spans)]
        k_bounds = [0, *accumulate(span.stop for span in spans)]
        first = spans[0].first_token
        tokens = slice(first, first + q_bounds[-1])
        return PromptPiece(spans, [self._call(tokens, q_bounds, k_bounds, True, True)])

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
        return PromptPiece([span], calls)

    def _call(
        self, tokens: slice, q_bounds: list[int], k_bounds: list[int], causal: bool, is_first: bool
    ) -> PromptCall:
        return PromptCall(tokens, self._add(q_bounds), self._add(k_bounds), causal, is_first)

    def _add(self, bounds: Sequence[int]) -> slice:
        place = slice(len(self.index), len(self.index) + len(bounds))
        self.index += [*bounds, *[0] * (-len(bounds) % 4)]
        return place
