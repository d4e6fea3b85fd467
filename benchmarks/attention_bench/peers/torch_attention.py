"""torch's own attention over contiguous keys: scaled_dot_product_attention and flex."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_bench.exact import CallResult
from attention_bench.implementations import Call, Prepared, require
from attention_bench.inputs import AttendInputs


def attend_forced(backend: str, inputs: AttendInputs) -> Prepared:
    """A GPU backend by its name. Its causal mask is for equal lengths, and it has no window."""
    case = inputs.case
    require(case.q_len in (1, case.seq_len), "aligns a causal mask to the first key")
    require(case.window is None, "has no window without a mask tensor")
    if backend == "FLASH_ATTENTION":
        require(case.head_dim == case.head_dim_v, "needs equal head dims")
    forced = partial(sdpa_kernel, SDPBackend.__members__[backend])
    calls = _calls(inputs, is_causal=case.q_len > 1)
    return Prepared(calls, tokens_first, context=forced)


def attend(inputs: AttendInputs) -> Prepared:
    """torch's own choice, with a mask tensor where queries are fewer than keys."""
    case = inputs.case
    if case.q_len in (1, case.seq_len):
        return Prepared(_calls(inputs, is_causal=case.q_len > 1), tokens_first)
    mask = torch.ones(case.q_len, case.seq_len, dtype=torch.bool, device=inputs.queries[0].device)
    return Prepared(_calls(inputs, attn_mask=mask.tril(case.seq_len - case.q_len)), tokens_first)


def _calls(inputs: AttendInputs, **options: Any) -> list[Call]:
    gqa = inputs.case.num_heads != inputs.case.num_kv_heads
    return [
        partial(
            scaled_dot_product_attention,
            *heads_first(inputs, rotation),
            enable_gqa=gqa,
            **options,
        )
        for rotation in range(len(inputs.queries))
    ]


def heads_first(inputs: AttendInputs, rotation: int) -> list[torch.Tensor]:
    """Queries, keys and values of a rotation as views [num_seqs, num_heads, length, dim]."""
    q, keys = inputs.queries[rotation], inputs.dense[rotation]
    padded = q.view(inputs.case.num_seqs, inputs.case.q_len, *q.shape[1:])
    return [x.transpose(1, 2) for x in (padded, keys.k, keys.v)]


def tokens_first(out: torch.Tensor) -> CallResult:
    """[num_seqs, num_heads, q_len, dim] as packed tokens."""
    return CallResult(out.transpose(1, 2).flatten(0, 1))


def attend_flex(inputs: AttendInputs) -> Prepared:
    """Causal flex attention, compiled for the shape, with its block mask made beforehand."""
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
