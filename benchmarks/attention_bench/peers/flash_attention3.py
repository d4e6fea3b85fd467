"""FlashAttention-3 for Hopper, as the operators of vLLM's build of it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from attention_bench.cases import DTYPES, AttendCase
from attention_bench.exact import CallResult
from attention_bench.implementations import Prepared, require
from attention_bench.inputs import AttendInputs
from attention_bench.peers.site import find_library

LIBRARY = "_vllm_fa3_C.abi3.so"


@cache
def _load() -> Any:
    path = find_library(LIBRARY)
    require(torch.cuda.get_device_capability()[0] == 9, "needs a Hopper GPU")
    torch.ops.load_library(str(path))  # pyright: ignore[reportUnknownMemberType]
    return torch.ops._vllm_fa3_C


def attend_paged(inputs: AttendInputs) -> Prepared:
    """Keys through a page table, with the schedule that an engine makes once a step."""
    operators, case, keys = _load(), inputs.case, inputs.paged
    lengths = keys[0].seq_lens
    make_plan = partial(
        operators.get_scheduler_metadata,
        case.num_seqs,
        case.q_len,
        case.seq_len,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.head_dim_v,
        DTYPES[case.dtype],
        lengths,
        inputs.cu_seqlens_q,
        *(None, None, None, None),  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
        case.page_size,
        0,  # max_seqlen_k_new
        True,  # causal
        *_window(case),
        False,  # softcap
        0,  # num_splits: its own choice
        None,  # pack_gqa
        0,  # sm_margin
    )
    plan = make_plan()
    calls = [
        _call(inputs, q, x.k, x.v, lengths=lengths, table=x.page_table, plan=plan)
        for q, x in zip(inputs.queries, keys, strict=True)
    ]
    return Prepared(calls, lambda result: CallResult(result[0]), make_plan)


def attend_ragged(inputs: AttendInputs) -> Prepared:
    calls = [
        _call(inputs, q, x.k, x.v, cu_seqlens_k=x.cu_seqlens)
        for q, x in zip(inputs.queries, inputs.ragged, strict=True)
    ]
    return Prepared(calls, lambda result: CallResult(result[0]))


def _window(case: AttendCase) -> tuple[int, int]:
    """Its convention: keys to the left and right of the query, -1 for all of them."""
    return (-1, -1) if case.window is None else (case.window - 1, 0)


def _call(
    inputs: AttendInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_k: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
) -> partial[Any]:
    case = inputs.case
    return partial(
        _load().fwd,
        q,
        k,
        v,
        *(None, None, None, None),  # k_new, v_new, q_v, out
        inputs.cu_seqlens_q,
        cu_seqlens_k,
        *(None, None),  # cu_seqlens_k_new, seqused_q
        lengths,
        case.q_len,
        case.seq_len,
        table,
        *(None,) * 8,  # kv_batch_idx, leftpad_k, rotary cos, sin, lengths; q, k, v descale
        case.head_dim**-0.5,
        True,  # causal
        *_window(case),
        0.0,  # softcap
        True,  # rotary_interleaved
        plan,
        0,  # num_splits: its own choice
        None,  # pack_gqa
        0,  # sm_margin
        None,  # sinks
        *(1, 0, None),  # context parallelism: ranks, rank, lengths
    )
