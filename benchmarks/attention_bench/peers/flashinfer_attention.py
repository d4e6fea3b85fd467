"""FlashInfer: its merge, and decode and append over paged keys. It compiles itself on first use."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch

from anabranch.state import AttentionState
from attention_bench.cases import DTYPES
from attention_bench.exact import CallResult
from attention_bench.implementations import Prepared, require
from attention_bench.inputs import AttendInputs, MergeInputs
from attention_bench.peers.site import import_peer

WORKSPACE_BYTES = 256 << 20


def merge(inputs: MergeInputs) -> Prepared:
    """merge_state, whose LSE is in base 2: converted before the clock runs."""
    library = import_peer("flashinfer")
    require(inputs.case.dtype != "float32", "merges 16-bit states only")

    def base_2(state: AttentionState) -> tuple[torch.Tensor, torch.Tensor]:
        return state.out, state.lse * math.log2(math.e)

    calls = [partial(library.merge_state, *base_2(a), *base_2(b)) for a, b in inputs.pairs]
    return Prepared(calls, lambda result: CallResult(result[0], result[1] * math.log(2)))


def attend(inputs: AttendInputs) -> Prepared:
    """Keys through a page table."""
    case = inputs.case
    # Every head dim and every window is another compilation of half a minute.
    require(case.head_dim == case.head_dim_v == 128, "compiled for head dim 128 only")
    require(case.window is None, "compiled without a window only")
    wrapper, make_plan = _planned(import_peer("flashinfer"), inputs)
    make_plan()
    calls = [
        partial(wrapper.run, q, (keys.k, keys.v), out=torch.empty_like(q))
        for q, keys in zip(inputs.queries, inputs.paged, strict=True)
    ]
    return Prepared(calls, CallResult, make_plan)


@cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _table(inputs: AttendInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page table as indptr, indices and the number of keys in each last page."""
    case, table = inputs.case, inputs.paged[0].page_table
    indptr = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=table.device)
    last = case.seq_len - (table.shape[1] - 1) * case.page_size
    lasts = torch.full((case.num_seqs,), last, dtype=torch.int32, device=table.device)
    return indptr * table.shape[1], table.flatten(), lasts


def _planned(library: Any, inputs: AttendInputs) -> tuple[Any, partial[Any]]:
    """Decode on tensor cores for one query, append for more: one compiled module serves both."""
    table, decodes, starts = _table(inputs), inputs.case.q_len == 1, inputs.cu_seqlens_q
    suffix, names = "buffer" if decodes else "buf", ("indptr", "indices", "last_page_len")
    options: dict[str, Any] = {"use_cuda_graph": True, "backend": "fa2"}
    for name, tensor in zip(names, table, strict=True):
        options[f"paged_kv_{name}_{suffix}"] = tensor.clone()
    case, dtype = inputs.case, DTYPES[inputs.case.dtype]
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.page_size)
    if decodes:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(), use_tensor_cores=True, **options
        )
        return wrapper, partial(wrapper.plan, *table, *shape, q_data_type=dtype)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(), qo_indptr_buf=starts.clone(), **options
    )
    return wrapper, partial(wrapper.plan, starts, *table, *shape, causal=True, q_data_type=dtype)
