"""A sequence has the same bits in any batch, whoever holds its parts and wherever they are merged.

Batches take some sequences of one call, some of them several times. So one sequence is spread over
all workers, shared by a few, or held whole, where its parts never leave the registers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, assert_right, integers, make_inputs, starts
from states import random_state

from anabranch import AttentionState, PagedKV, Plan, attend, make_plan
from anabranch.kernels.config import AttendConfig
from anabranch.kernels.parts.slots import num_slots
from anabranch.kernels.schedule.schedule import num_blocks_bound

HALF, BRAIN = torch.float16, torch.bfloat16
GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=GPU)]
)
BASE = Case(
    q_lens=(2, 2, 2, 2), k_lens=(150, 9, 60, 0), dims=(16, 16), dtype=HALF, page_size=16, padding=0
)
FEW_ROWS = AttendConfig(16, 16, 4, 2, 4, merge_price=0, part_tiles=2, group_parts=2)
TRANSPOSED = replace(FEW_ROWS, keys_first=True)
MORE_ROWS = replace(FEW_ROWS, block_m=32, num_stages=3, group_parts=8)
MANY_ROWS = replace(FEW_ROWS, block_m=64, merge_rows=16, deals=False)
DEALT = replace(MANY_ROWS, deals=True, merge_price=6)
# The first sequence has groups of 2, 2 and 1 parts. With six workers: each part on its own, whole
# groups and shared ones of one block on one worker, six blocks held whole, and some of each.
BATCHES = ((0,), (0, 0), (0, 0, 0), (0,) * 6, (2, 0, 1, 3, 0))
FEW_BATCHES = ((0,), (0, 0, 0), (2, 0, 1, 3, 0, 0, 0))


def planned(q: torch.Tensor, keys: PagedKV, options: dict[str, Any], **given: object) -> Plan:
    names = ("cu_seqlens_q", "causal", "window", "tree_mask")
    shape = {name: options[name] for name in names}
    return make_plan(q, keys, impl="triton", batch_invariant=True, **shape, **given)


def chosen(
    case: Case, inputs: tuple[torch.Tensor, PagedKV, dict[str, Any]], seqs: tuple[int, ...]
) -> tuple[torch.Tensor, PagedKV, dict[str, Any], torch.Tensor]:
    """Some sequences of a call as a call of their own, and their rows in it."""
    q, keys, options = inputs
    length = case.q_lens[0]
    tokens = torch.cat([torch.arange(length * seq, length * (seq + 1)) for seq in seqs])
    some = replace(keys, page_table=keys.page_table[[*seqs]], seq_lens=keys.seq_lens[[*seqs]])
    own = {**options, "cu_seqlens_q": starts(case, [length] * len(seqs))}
    return q[tokens.to(q.device)], some, own, tokens.to(q.device)


def check_batches(
    case: Case,
    batches: tuple[tuple[int, ...], ...],
    prior: AttentionState | None = None,
    **given: object,
) -> list[bool]:
    """Whether each batch has left parts to merge; fresh memory is NaN."""
    inputs = make_inputs(case, 0)
    known: dict[int, AttentionState] = {}
    left = []
    for batch in batches:
        q, keys, options, tokens = chosen(case, inputs, batch)
        plan = planned(q, keys, options, **given)
        own = None if prior is None else AttentionState(*(x[:, tokens] for x in prior))
        state = attend(q, keys, plan=plan, prior=own, impl="triton", **options)
        if prior is None:
            assert_right(state, q, keys, options)
        assert not plan.work.parts.counters.any()
        left.append(not plan.work.parts.lses.isnan().all())
        for place, seq in enumerate(batch):
            rows = slice(place * case.q_lens[0], (place + 1) * case.q_lens[0])
            part = AttentionState(state.out[rows], state.lse[rows])
            for mine, theirs in zip(part, known.setdefault(seq, part), strict=True):
                assert torch.equal(mine, theirs), (batch, place)
    return left


@every_device
@pytest.mark.parametrize(
    ("config", "fused", "left"),
    [
        pytest.param(FEW_ROWS, True, [True, True, True, False, True], id="few rows"),
        pytest.param(FEW_ROWS, False, [True, True, True, False, True], id="merged apart"),
        pytest.param(TRANSPOSED, True, [True, True, True, False, True], id="transposed"),
        pytest.param(MORE_ROWS, True, [True, True, True, False, True], id="more rows"),
        pytest.param(MANY_ROWS, True, [True, True, True, False, True], id="many rows"),
        pytest.param(DEALT, True, [True, False, False, False, False], id="dealt out"),
    ],
)
def test_tiles(
    config: AttendConfig, fused: bool, left: list[bool], device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("anabranch.kernels.triton.plan.num_sms", lambda _: 3)
    dims = (16, 128 if config.block_m == 64 else 16)  # so many sums leave the loop over tiles
    case = replace(BASE, dims=dims, device=device)
    assert check_batches(case, BATCHES, config=config, fused_merge=fused) == left


@every_device
@pytest.mark.parametrize(
    "options",
    [
        {"sinks": True, "softcap": 5.0},
        {"window": 40, "sinks": True},
        {"formats": ("fp8_tensor", "fp8_tensor"), "dims": (64, 64), "sinks": True},
        {"formats": ("q8_0", "int8"), "dims": (64, 64), "window": 70},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], device: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("anabranch.kernels.triton.plan.num_sms", lambda _: 3)
    config = replace(TRANSPOSED, group_parts=1 if "formats" in options else 2)
    check_batches(replace(BASE, **options, device=device), FEW_BATCHES, config=config)


@every_device
@pytest.mark.parametrize("name", ["plain", "fp8_tensor"])
def test_prior_states(name: str, device: str, monkeypatch: Any) -> None:
    """They enter the first part, also where its sums have a scale until its end."""
    monkeypatch.setattr("anabranch.kernels.triton.plan.num_sms", lambda _: 3)
    case = replace(BASE, dims=(64, 64), formats=(name, name), sinks=True, device=device)
    prior = random_state((2, 8, 6, 64), 1, dtype=HALF, device=device)
    assert all(check_batches(case, FEW_BATCHES, prior, config=TRANSPOSED))


@GPU
@pytest.mark.parametrize(
    ("group", "q_len", "formats"),
    [
        (4, 1, ("plain", "plain")),
        (8, 2, ("plain", "plain")),
        (8, 3, ("plain", "plain")),
        (4, 1, ("fp8_tensor", "fp8_tensor")),
        (8, 16, ("plain", "plain")),
    ],
)
def test_selected_tiles(group: int, q_len: int, formats: tuple[str, str]) -> None:
    case = Case(
        q_lens=(q_len,) * 4, k_lens=(9000, 300, 4097, 30000), dims=(128, 128), group=group,
        num_kv_heads=8, dtype=BRAIN, page_size=16, padding=0, formats=formats, device="cuda",
    )  # fmt: skip
    batches = ((0,), (3,), (0,) * 8, (0,) * 70, (0, 1, 2, 3), (2,) * 40, (3, 2, 1, 0, 1, 2, 1) * 9)
    assert check_batches(case, batches)[0]


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ((1,), (700,)),  # all workers share one block
        ((1,) * 12, (64,) * 12),  # whole blocks
        ((1, 3, 0, 2, 1, 1, 1), (640, 40, 70, 0, 300, 16, 17)),
        ((40, 1, 70), (700, 33, 300)),  # several blocks a sequence, some of which are never cut
        ((1,) * 9, (33,) * 4 + (700,) + (33,) * 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("whole_rows", [150, 512])
def test_slots_of_cut_blocks(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], whole_rows: int
) -> None:
    """Blocks that several workers hold have slots of their own, within the room there is."""
    case = replace(BASE, q_lens=q_lens, k_lens=k_lens)
    q, keys, options = make_inputs(case, 0)
    config = replace(FEW_ROWS, whole_rows=whole_rows)
    plan = planned(q, keys, options, config=config).work
    constants = plan.program.constants
    share, _, num_blocks = plan.schedule[:3].tolist()
    workers = plan.schedule[8:][: 6 * 16].view(6, 16).tolist()
    used: list[int] = []
    for record in plan.schedule[8 + 6 * 16 :][: num_blocks * 8].view(-1, 8).tolist():
        _, _, _, q_len, _, _, num_tiles, first = record
        is_whole = q_len * 3 >= whole_rows or num_tiles <= 4
        size = max(num_tiles, 1) if is_whole else max(2, -(-num_tiles // 6))
        held = [(first + tile) // share for tile in range(0, num_tiles, size)]
        assert len(held) <= 6
        if len(set(held)) > 1:
            slot = workers[held[0]][1]
            used += range(slot, slot + len(held))
    assert len(used) == len(set(used))
    room = num_slots(keys, num_blocks_bound(keys.num_seqs, len(q), constants), constants)
    assert max(used, default=0) < room // constants.num_kv_heads
    assert len(plan.parts.lses) == room


def test_shares_end_where_parts_do() -> None:
    """Where all parts have one size: no worker has a part more than it must."""
    case = replace(BASE, q_lens=(1,), k_lens=(16 * 11,))
    q, keys, options = make_inputs(case, 0)
    plan = planned(q, keys, options, config=FEW_ROWS).work
    assert plan.schedule[:2].tolist() == [2, 12]  # six parts of two tiles, the last one short
    lens = integers(case, [16 * 11, 16 * 5, 16 * 7])
    table = keys.page_table.expand(3, -1)
    batch = PagedKV(keys.k, keys.v, table, lens)
    options["cu_seqlens_q"] = integers(case, [0, 1, 2, 3])
    plan = planned(q.expand(3, -1, -1), batch, options, config=FEW_ROWS).work
    assert plan.schedule[:2].tolist() == [6, 26]


def test_shares_end_where_groups_do() -> None:
    """If that makes shares hardly longer: 8 sequences of 32 parts on 33 workers, 8 parts each."""
    case = replace(BASE, q_lens=(1,), k_lens=(16 * 128,), num_kv_heads=1)
    q, keys, options = make_inputs(case, 0)
    config = replace(FEW_ROWS, workers_per_sm=11, part_tiles=4, group_parts=8)
    for num_seqs, units in ((8, 32), (9, 36)):  # of a share; groups would make it 64
        batch = replace(
            keys,
            page_table=keys.page_table.expand(num_seqs, -1),
            seq_lens=keys.seq_lens.expand(num_seqs).contiguous(),
        )
        own = {**options, "cu_seqlens_q": torch.arange(num_seqs + 1, dtype=torch.int32)}
        plan = planned(q.expand(num_seqs, -1, -1), batch, own, config=config).work
        assert plan.program.constants.division.num_workers == 33
        assert plan.schedule[0] == units
