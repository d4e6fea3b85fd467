"""A group of one rank over NCCL: collectives and plans in a CUDA graph, at other lengths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_right, make_inputs

from anabranch import AttentionState
from anabranch.distributed import DealtKV, attend_across, merge_across

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("heads", ["all", "scattered"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [None, 20])
def test_a_graph_follows_the_lengths(heads: str, q_len: int, window: int | None) -> None:
    case = Case(
        q_lens=(q_len,) * 3, k_lens=(70, 33, 9), page_size=16, group=4, window=window,
        dtype=torch.bfloat16, padding=0, device="cuda",
    )  # fmt: skip
    q, whole, options = make_inputs(case, 0)
    keys = DealtKV(whole.k, whole.v, whole.page_table, whole.seq_lens, 0, 1)

    def call() -> AttentionState:
        return attend_across(q, keys, heads=heads, max_q_len=q_len, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = call()
    for lens in ((70, 33, 9), (12, 0, 9), (5, 33, 1)):
        whole.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        assert_right(state, q, whole, options)


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("heads", ["all", "scattered"])
def test_a_group_of_one_changes_nothing(heads: str) -> None:
    state = AttentionState(torch.randn(5, 4, 40), torch.randn(5, 4))
    state.lse[1], state.out[1] = -torch.inf, 0.0
    state = AttentionState(*(x.cuda() for x in state))
    for got, right in zip(merge_across(state, heads=heads), state, strict=True):
        assert torch.equal(got, right)
