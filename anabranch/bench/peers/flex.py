"""flex attention, compiled by torch for the shape of the case."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from anabranch.bench.implementations import Prepared, require
from anabranch.bench.inputs import AttendInputs
from anabranch.bench.peers.sdpa import heads_first, tokens_first


def attend(inputs: AttendInputs) -> Prepared:
    """Causal flex attention over contiguous keys, with its block mask made beforehand."""
    case = inputs.case
    require(case.flex, "compiles for every shape: timed in one case")
    from torch.nn.attention import flex_attention as flex

    def causal(_seq: Any, _head: Any, query: Any, key: Any) -> Any:
        return query >= key

    lengths = (case.seq_len, case.seq_len)
    device = str(inputs.queries[0].device)
    mask = flex.create_block_mask(causal, None, None, *lengths, device=device)
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)  # pyright: ignore[reportUnknownMemberType]
    calls = [
        partial(compiled, *heads_first(inputs, rotation), block_mask=mask, enable_gqa=True)
        for rotation in range(len(inputs.queries))
    ]
    return Prepared(calls, tokens_first)
