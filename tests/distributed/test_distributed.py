"""States and keys on several ranks merge to the state over all keys, on every rank."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_right, make_inputs
from conftest import HAS_GPU
from rank_processes import CONTEXT, NUM_RANKS, assert_all_pass, end, join_group, start

import anabranch as ab
from anabranch import AttentionState, PagedKV
from anabranch.distributed import (
    DealtKV,
    attend_across,
    deal_table,
    merge_across,
    plan_across,
    state_buffer,
)
from anabranch.distributed.attend_across import attend_locally
from anabranch.distributed.rank_group import RankGroup
from anabranch.distributed.state_buffer import ALIGNMENT

every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="compiled for the GPU here")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
SHAPE = (5, 12, 40)  # tokens, heads, dim: 60 rows


def own_keys(keys: PagedKV, rank: int, num_ranks: int) -> DealtKV:
    """A rank's pages of `keys`, and NaN in those of other ranks."""
    table = deal_table(keys.page_table, rank, num_ranks)
    k, v = (torch.full_like(x, torch.nan) for x in (keys.k, keys.v))
    local = DealtKV(k, v, table, keys.seq_lens, rank, num_ranks)
    for seq, length in enumerate(local.local_lens().tolist()):
        pages = table[seq, : -(-length // keys.page_size)].long()
        k[pages], v[pages] = keys.k[pages], keys.v[pages]
    return local


@cache
def subgroup() -> tuple[Any, int, int]:
    """The group with one rank left out, where there are enough; a rank that is out gets -1."""
    num_ranks = dist.get_world_size()
    if num_ranks < 4:
        return None, dist.get_rank(), num_ranks
    members = [rank for rank in range(num_ranks) if rank != 1]
    group = dist.new_group(members)
    return group, members.index(dist.get_rank()) if dist.get_rank() != 1 else -1, len(members)


def all_equal(state: AttentionState) -> bool:
    """Whether every rank of the default group has the same bits."""
    mine = torch.cat([x.flatten().view(torch.uint8) for x in (state.out, state.lse)])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


def rank_states(seed: int, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> AttentionState:
    """A state for each rank, of which some are empty, in some rows all."""
    generator = torch.Generator().manual_seed(seed)
    num_ranks = dist.get_world_size()
    lse = torch.randn(num_ranks, *shape[:-1], generator=generator) * 20
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -torch.inf
    lse[seed % num_ranks] = -torch.inf
    lse[:, 0, ..., ::3] = -torch.inf  # of the first token, or all of it
    out = torch.randn(num_ranks, *shape, generator=generator).to(dtype)
    return AttentionState(out.masked_fill(lse[..., None] == -torch.inf, 0.0), lse)


def merged_states() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16]):
        states = rank_states(seed, dtype)
        expected = ab.merge(states, dim=0)
        mine = AttentionState(*(x[rank] for x in states))
        state = merge_across(mine, check=True)
        scattered = merge_across(mine, heads="scattered")
        size = SHAPE[1] // num_ranks
        heads = slice(rank * size, (rank + 1) * size)
        for got, part, right in zip(state, scattered, expected, strict=True):
            assert torch.equal(got, right)
            assert torch.equal(part, right[:, heads])
        assert all_equal(state)
        assert (state.lse[0, ::3] == -torch.inf).all()
        assert not state.out[0, ::3].count_nonzero()


def odd_shapes() -> None:
    """Rows that no number of ranks divides, one row, no rows, other ranks, any strides."""
    for shape in ((3, 7, 5), (1, 1, 3), (0, 4, 8), (2, 3, 2, 16), (1, 5, 2)):
        states = rank_states(3, torch.float16, (max(shape[0], 1), *shape[1:]))
        states = AttentionState(*(x[:, : shape[0]] for x in states))
        mine = AttentionState(*(x[dist.get_rank()] for x in states))
        strided = AttentionState(
            mine.out.transpose(0, -1).contiguous().transpose(0, -1),
            mine.lse.transpose(0, -1).contiguous().transpose(0, -1),
        )
        expected = ab.merge(states, dim=0)
        for got, right in zip(merge_across(strided), expected, strict=True):
            assert torch.equal(got, right)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """What this rank receives from others in each collective, while these are replaced."""
    received: list[int] = []
    names = ("all_gather", "all_to_all")
    real = {name: getattr(state_buffer, name) for name in names}

    def counting(name: str) -> Any:
        def call(output: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
            num_ranks = dist.get_world_size(group)
            received.append(output.nbytes * (num_ranks - 1) // num_ranks)
            real[name](output, sent, group)

        return call

    try:
        for name in names:
            setattr(state_buffer, name, counting(name))
        yield received
    finally:
        for name in names:
            setattr(state_buffer, name, real[name])


def bytes_on_the_wire() -> None:
    """At most (dim + 1) * 4 bytes a row more than a sum of the outputs moves; in fact 4 or 8."""
    num_ranks = dist.get_world_size()
    rows, dim = SHAPE[0] * SHAPE[1], SHAPE[2]
    for dtype in (torch.float32, torch.bfloat16):
        mine = AttentionState(*(x[dist.get_rank()] for x in rank_states(0, dtype)))
        for heads, passes in (("scattered", 1), ("all", 2)):
            with counted_bytes() as received:
                merge_across(mine, heads=heads)
            others = (num_ranks - 1) / num_ranks
            outputs = passes * others * rows * dim * dtype.itemsize
            assert len(received) == (1 if num_ranks == 2 else passes)
            assert outputs < sum(received) <= outputs + rows * (dim + 1) * 4
            padding = 2 * ALIGNMENT * num_ranks
            assert sum(received) <= outputs + passes * others * (rows * 4 + padding)


def fuzzed_case(seed: int) -> Case:
    random.seed(seed)
    num_seqs = random.randint(1, 4)
    q_lens = tuple(random.choice([0, 1, 1, 2, 3, 5, 19]) for _ in range(num_seqs))
    k_lens = tuple(random.choice([0, 1, 3, 4, 5, 8, 16, 17, 33, 70]) for _ in range(num_seqs))
    rule = random.choice(["causal", "causal", "window", "window", "all", "tree", "both"])
    return Case(
        q_lens=q_lens,
        k_lens=k_lens,
        source=random.choice(["paged", "paged by heads", "paged k|v"]),
        page_size=random.choice([1, 3, 4, 8]),
        num_kv_heads=random.choice([1, 2]),
        group=12,
        dims=random.choice([(16, 16), (24, 8)]),
        dtype=random.choice([torch.float32, torch.bfloat16]),
        causal=rule not in ("all", "both"),
        window=random.choice([1, 2, 7, 20, 100]) if rule in ("window", "both") else None,
        tree_width=random.choice([1, 3, 19]) if rule == "tree" else None,
        softcap=random.choice([None, None, 5.0]),
        sinks=random.random() < 0.3,
        padding=random.choice([0, 2]),
    )


def check_case(case: Case, seed: int, group: Any, rank: int, num_ranks: int, **given: Any) -> None:
    q, keys, options = make_inputs(case, seed)
    mine = own_keys(keys, rank, num_ranks)
    state = attend_across(q, mine, group, **options, **given)
    assert_right(state, q, keys, options)
    scattered = attend_across(q, mine, group, heads="scattered", **options, **given)
    size = q.shape[1] // num_ranks
    for part, right in zip(scattered, state, strict=True):
        assert torch.equal(part, right[:, rank * size : (rank + 1) * size])


def fuzzed_attention() -> None:
    """12 heads a kv head scatter over 2, 3 and 4 ranks."""
    subgroup()  # made by all, also by those who are out
    group, rank, num_ranks = subgroup()
    for seed in range(60):
        case = fuzzed_case(seed)
        check_case(case, seed, None, dist.get_rank(), dist.get_world_size())
        if rank >= 0:
            check_case(case, seed, group, rank, num_ranks)


def decode_and_verify() -> None:
    """Every length around a page and a cycle of pages; sequences that leave ranks empty."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    lens = (0, 1, 3, 4, 5, 4 * num_ranks - 1, 4 * num_ranks, 4 * num_ranks + 1, 40)
    for q_len in (1, 2, 5):
        for window in (None, 6):
            case = Case(
                q_lens=(q_len,) * len(lens), k_lens=lens, page_size=4, group=12, dims=(16, 16),
                window=window, padding=0,
            )  # fmt: skip
            check_case(case, q_len, None, rank, num_ranks, max_q_len=q_len, check=True)
            q, keys, options = make_inputs(case, q_len)
            mine = own_keys(keys, rank, num_ranks)
            packed = attend_across(q, mine, max_q_len=q_len, **options)
            padded = q.unflatten(0, (-1, q_len))
            state = attend_across(padded, mine, window=window, scale=options["scale"])
            for got, right in zip(state, packed, strict=True):
                assert torch.equal(got.flatten(0, 1), right)


def plans_are_shared() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for window in (None, 5):
        case = Case(q_lens=(3, 1), k_lens=(21, 9), page_size=4, window=window, dims=(16, 16))
        q, keys, options = make_inputs(case, 0)
        mine = own_keys(keys, rank, num_ranks)
        planned = {name: options[name] for name in ("cu_seqlens_q", "causal", "window")}
        plan = plan_across(q, mine, max_q_len=3, **planned)
        layers = [mine, replace(mine, k=mine.v, v=mine.k)]
        wholes = [keys, replace(keys, k=keys.v, v=keys.k)]
        for layer, whole in zip(layers, wholes, strict=True):
            assert_right(attend_across(q, layer, plan=plan, **options), q, whole, options)
        with pytest.raises(ValueError, match=r"the plan was made for window = .*, got 2"):
            attend_across(q, mine, plan=plan, **(options | {"window": 2}))
        with pytest.raises(ValueError, match=r"the plan was made for num_tokens = 6, got 5"):
            attend_across(q[:5], mine, plan=plan, **options)


def new_tokens_are_written() -> None:
    """append_kv with a rank's slots, then attention, as in a step of an engine."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    case = Case(q_lens=(5, 1), k_lens=(21, 9), page_size=4, dims=(16, 16), padding=0)
    q, keys, options = make_inputs(case, 0)
    mine = own_keys(keys, rank, num_ranks)
    seqs = torch.tensor([0] * 5 + [1])
    positions = torch.tensor([16, 17, 18, 19, 20, 8])
    k, v = torch.randn(2, 6, 2, 16)
    slots = mine.slots_of(seqs, positions)
    held = torch.tensor([p // 4 % num_ranks == rank for p in positions.tolist()])
    assert torch.equal(slots >= 0, held)
    ab.append_kv(PagedKV(mine.k, mine.v, mine.page_table, mine.seq_lens), k, v, slots)
    pages = keys.page_table[seqs, positions // 4]
    ab.append_kv(keys, k, v, pages * 4 + positions % 4)
    assert_right(attend_across(q, mine, **options), q, keys, options)


def bad_input() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    state = AttentionState.empty((3, num_ranks + 1, 8))
    with pytest.raises(ValueError, match=f"{num_ranks + 1} heads cannot be scattered over"):
        merge_across(state, heads="scattered")
    with pytest.raises(ValueError, match="heads must be one of all, scattered, got 'some'"):
        merge_across(state, heads="some")
    with pytest.raises(ValueError, match=r"got shapes \(3, .*, 8\) and \(3,\)"):
        merge_across(AttentionState(state.out, state.lse[:, 0]))
    with pytest.raises(ValueError, match=r"must be one of float16.*, got torch.float64"):
        merge_across(AttentionState(state.out.double(), state.lse))
    with pytest.raises(ValueError, match=r"shape differs between ranks: \(1, 2, 8\) on rank 0, "):
        merge_across(AttentionState.empty((rank + 1, 2, 8)), check=True)
    q, keys, _ = make_inputs(Case(q_lens=(1,), k_lens=(9,), padding=0), 0)
    mine = own_keys(keys, rank, num_ranks)
    with pytest.raises(ValueError, match=r"keys are those of rank .* this process is rank"):
        attend_across(q, replace(mine, rank=(rank + 1) % num_ranks))
    with pytest.raises(ValueError, match="seq_lens differs between ranks"):
        attend_across(q, replace(mine, seq_lens=mine.seq_lens + rank), check=True)
    with pytest.raises(ValueError, match="max_q_len must be at least 1, got 0"):
        attend_across(q, mine, cu_seqlens_q=torch.tensor([0, 1]).int(), max_q_len=0)
    with pytest.raises(ValueError, match=r"tree_mask must be one of bool, got torch.int32"):
        attend_across(q, mine, tree_mask=torch.ones(1, 1).int())
    with pytest.raises(ValueError, match="sinks has num_heads = 5, but q has num_heads = 6"):
        attend_across(q, mine, sinks=torch.zeros(5))
    with pytest.raises(ValueError, match="window must be at least 1, a token's own key, got 0"):
        attend_across(q, mine, window=0)
    group = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match=f"process {rank} does not belong to the group"):
            merge_across(state, group)


CHECKS = [
    merged_states,
    odd_shapes,
    bytes_on_the_wire,
    decode_and_verify,
    fuzzed_attention,
    plans_are_shared,
    new_tokens_are_written,
    bad_input,
]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks(num_ranks: int) -> None:
    """One group of processes runs all checks; one test, so that it starts once."""
    assert_all_pass(num_ranks, CHECKS)


@every_device
@pytest.mark.parametrize(
    "rule",
    [{}, {"window": 6}, {"causal": False}, {"window": 6, "causal": False}, {"tree_width": 3}],
    ids=str,
)
def test_parts_of_ranks_merge(rule: dict[str, Any], device: str) -> None:
    """In the kernel, all ranks in one process: their states, merged, are the reference's."""
    case = Case(
        q_lens=(1, 3, 0, 5), k_lens=(20, 3, 9, 31), page_size=4, group=4, dims=(16, 16),
        sinks=True, device=device, **rule,
    )  # fmt: skip
    q, keys, options = make_inputs(case, 0)
    planned = ("cu_seqlens_q", "causal", "window", "tree_mask")
    shared = {name: options[name] for name in planned}
    given = {name: options[name] for name in options.keys() - planned}
    states = []
    for rank in range(3):
        mine = own_keys(keys, rank, 3)
        plan = plan_across(q, mine, max_q_len=5, **shared)
        states.append(attend_locally(q, mine, plan, impl="triton", **given))
    assert_right(ab.merge(*states), q, keys, options)


def merge_until_killed(rank: int, num_ranks: int, store: str, results: Any) -> None:
    join_group(rank, num_ranks, store)
    state = AttentionState.empty((2, num_ranks, 8))
    merge_across(state)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            merge_across(state)
    except RuntimeError:
        results.put(rank)


def test_a_killed_rank_is_an_error_on_the_others() -> None:
    queue = CONTEXT.SimpleQueue()
    processes = start(3, merge_until_killed, queue)
    end(processes)
    assert sorted([queue.get(), queue.get()]) == [0, 2]
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]


def test_without_a_group() -> None:
    with pytest.raises(ValueError, match=r"no process group: call .*init_process_group first"):
        merge_across(AttentionState.empty((2, 4, 8)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("heads", ["all", "scattered"])
def test_one_rank_keeps_its_state(heads: Any, one_rank: None) -> None:
    state = AttentionState(torch.randn(SHAPE), torch.randn(SHAPE[:-1]))
    for got, right in zip(merge_across(state, heads=heads, check=True), state, strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_position_is_dealt_once(page_size: int, num_ranks: int) -> None:
    """Ranks hold disjoint positions, in order, also where there are fewer pages than ranks."""
    cache = torch.empty(1, page_size, 1, 8)
    length = 23
    table = torch.zeros(1, 30, dtype=torch.int32)
    seen: list[int] = []
    for rank in range(num_ranks):
        own = deal_table(table, rank, num_ranks)
        keys = DealtKV(cache, cache, own, torch.tensor([length]).int(), rank, num_ranks)
        count = int(keys.local_lens())
        positions = keys.positions_of(torch.arange(count)).tolist()
        assert positions == sorted(p for p in positions if p // page_size % num_ranks == rank)
        before = keys.keys_before(torch.arange(-2, length + 1)).tolist()
        assert before == [sum(p < at for p in positions) for at in range(-2, length + 1)]
        for span in (1, 3, 4, 9, 100):
            starts = torch.arange(-span, length)
            ends = (starts + span).clamp_max(length)
            most = int((keys.keys_before(ends) - keys.keys_before(starts)).max())
            assert most <= keys.most_keys(span) <= own.shape[1] * page_size
        seen += positions
    assert sorted(seen) == [*range(length)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, r"rank must lie in \[0, num_ranks\), got 2 of 2"),
        ({"rank": -1}, r"rank must lie in \[0, num_ranks\), got -1 of 2"),
        ({"num_ranks": 0, "rank": 0}, r"rank must lie in \[0, num_ranks\), got 0 of 0"),
        ({"seq_lens": torch.zeros(1)}, "seq_lens must be one of int32, got torch.float32"),
        ({"page_table": torch.zeros(2, 1).int()}, "seq_lens has num_seqs = 1, but page_table has"),
    ],
    ids=str,
)
def test_dealt_keys_that_are_refused(change: dict[str, Any], message: str) -> None:
    given = {
        "k": torch.empty(2, 4, 1, 8),
        "v": torch.empty(2, 4, 1, 8),
        "page_table": torch.zeros(1, 1).int(),
        "seq_lens": torch.zeros(1).int(),
        "rank": 0,
        "num_ranks": 2,
    }
    with pytest.raises(ValueError, match=message):
        DealtKV(**(given | change))


def test_the_documented_bytes_are_those_of_the_merge() -> None:
    """The scale plan counts what a buffer of states holds, and the document has its table."""
    root = Path(__file__).parents[2]
    spec = importlib.util.spec_from_file_location("scale_plan", root / "benchmarks/scale_plan.py")
    assert spec is not None
    assert spec.loader is not None
    plan = sys.modules["scale_plan"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan)
    shape = plan.SMALL
    state = (1, shape.heads, shape.head_dim)
    buffer = state_buffer.StateBuffer.allocate(1, state, torch.bfloat16, torch.device("cpu"))
    for num_ranks in (2, 4, 8):
        received = 2 * (num_ranks - 1) / num_ranks * buffer.data.nbytes
        assert plan.context_parallel(shape, num_ranks).num_bytes == received
    assert plan.bytes_table() in (root / "docs/scale.md").read_text()


@every_device
def test_only_a_checked_call_waits_for_agreement(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it compares what must be the same on every rank."""
    module: Any = importlib.import_module("anabranch.distributed.attend_across")
    compared = list[dict[str, Any]]()
    monkeypatch.setattr(module, "find_group", lambda group: RankGroup(group, 0, 1))
    monkeypatch.setattr(module, "merge_across", lambda state, *_, **__: state)
    monkeypatch.setattr(module, "check_agreement", lambda _, **given: compared.append(given))
    case = Case(q_lens=(1, 1), k_lens=(5, 20), source="paged", device=device)
    q, keys = make_inputs(case, 0)[:2]
    assert isinstance(keys, PagedKV)
    mine = own_keys(keys, 0, 1)
    expected = attend_across(q, mine)
    assert not compared
    assert torch.equal(attend_across(q, mine, check=True).out, expected.out)
    (given,) = compared
    assert given["seq_lens"] == [5, 20] and given["q"] == tuple(q.shape)
    assert given["dtype"] == q.dtype and given["page_size"] == keys.page_size
