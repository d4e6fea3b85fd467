"""The Hopper kernel by the same property as the Triton one, on a Hopper GPU; its order anywhere."""

from __future__ import annotations

import heapq
import random
from dataclasses import asdict, replace
from itertools import accumulate, pairwise, takewhile

import pytest
import torch
from cases import Case, assert_right, make_inputs
from lengths import call_of_lengths

from anabranch import AttentionState, attend, make_plan
from anabranch.call import AttendCall, PlanOptions, Queries
from anabranch.device import capability
from anabranch.kernels.gluon.plan import HopperLayout, lay_out
from anabranch.kernels.hopper_config import (
    HEAD_DIMS,
    TILE_PRICE,
    HopperConstants,
    Packing,
    cut_prices,
    hopper_constants,
    order_constants,
    pack_facts,
    select_tiles,
)
from anabranch.kernels.parts.merge_items import merge_constants
from anabranch.kernels.schedule.items import CUT, HEADER, ITEM
from anabranch.kernels.schedule.order import cut_ints, num_slots, order, order_size
from anabranch.rules import Rules

HALF, BRAIN = torch.float16, torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and capability(torch.device("cuda", 0))[0] == 9
hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
PLANNED = ("cu_seqlens_q", "causal", "window", "tree_mask")
MIXED = Case(
    q_lens=(130, 1, 257, 64, 0, 5),
    k_lens=(130, 300, 600, 64, 77, 0),
    page_size=16,
    group=4,
    dims=(128, 128),
    dtype=BRAIN,
    padding=7,
    device="cuda",
)
LONG = replace(MIXED, q_lens=(8, 3), k_lens=(20000, 4000))  # cut over keys
MANY = replace(  # whole blocks, several of them a processor
    MIXED,
    q_lens=(130, 1, 257, 64, 0, 5, 700, 90, 512, 33, 400, 128),
    k_lens=(130, 300, 600, 64, 77, 0, 700, 1000, 512, 33, 400, 128),
    num_kv_heads=8,
)


def check(case: Case, seed: int = 0, *, wide: bool = True, **planned: object) -> None:
    """`wide` tiles, which few blocks as those of the cases would not get otherwise."""
    q, keys, options = make_inputs(case, seed)
    planned["config"] = select_tiles(*case.dims) if wide else None
    given = {name: options[name] for name in PLANNED}
    plan = make_plan(q, keys, impl="gluon", **given, **planned)
    for _ in range(2):  # counters are left as they were found
        assert_right(attend(q, keys, plan=plan, **options), q, keys, options)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("case", [MIXED, LONG], ids=["mixed", "long"])
def test_head_dims(case: Case, dims: tuple[int, int]) -> None:
    check(replace(case, dims=dims, source="ragged"))
    check(replace(case, dims=dims, group=1, num_kv_heads=3), wide=False)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
@pytest.mark.parametrize(
    "case", [replace(MANY, source="ragged"), replace(MANY, window=100)], ids=["ragged", "window"]
)
def test_whole_blocks_have_the_same_bits_every_time(case: Case, dims: tuple[int, int]) -> None:
    """Copies for one item while consumers still read the one before would change some of them."""
    q, keys, options = make_inputs(replace(case, dims=dims), 0)
    plan = make_plan(q, keys, impl="gluon", **{name: options[name] for name in PLANNED})
    assert not plan.work.program.splits
    first, *others = [attend(q, keys, plan=plan, **options) for _ in range(20)]
    assert_right(first, q, keys, options)
    for state in others:
        assert torch.equal(state.lse, first.lse)
        assert torch.equal(state.out, first.out)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("source", ["paged", "paged by heads", "paged k|v"])
def test_pages(source: str, page_size: int) -> None:
    check(replace(MIXED, source=source, page_size=page_size), wide=source != "paged")


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("source", ["dense", "ragged"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_contiguous(source: str, dtype: torch.dtype) -> None:
    check(replace(MIXED, source=source, dtype=dtype))
    check(replace(MIXED, source=source, dtype=dtype, q_lens=(512, 256), k_lens=(512, 256)))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 5, 6, 8, 16, 32, 64])
def test_groups(group: int) -> None:
    check(replace(MIXED, group=group, source="ragged"), wide=group % 2 == 1)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("group", [3, 5, 7, 12])
@pytest.mark.parametrize("given", [{}, {"batch_invariant": True}], ids=str)
def test_few_tokens_of_groups_with_padding(group: int, given: dict[str, object]) -> None:
    case = replace(LONG, group=group, dims=(96, 96) if group == 5 else (128, 128))
    check(case, wide=False, **given)
    check(replace(case, sinks=True, num_kv_heads=3, q_lens=(1, 9), k_lens=(9, 9)), **given)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("given", [{}, {"batch_invariant": True}], ids=str)
def test_parts_are_merged(dims: tuple[int, int], given: dict[str, object]) -> None:
    check(replace(LONG, dims=dims, sinks=True, window=9000), **given)
    check(replace(MIXED, dims=dims), **given)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("case", [MIXED, LONG], ids=["mixed", "long"])
@pytest.mark.parametrize(
    "rules",
    [
        {"causal": False},
        {"window": 3},
        {"window": 200},
        {"softcap": 20.0},
        {"sinks": True},
        {"window": 100, "softcap": 5.0, "sinks": True},
    ],
    ids=str,
)
def test_rules(case: Case, rules: dict[str, object]) -> None:
    check(replace(case, **rules), wide=case is MIXED)


@hopper
@pytest.mark.gpu
def test_trees() -> None:
    check(replace(MIXED, q_lens=(40, 16, 64), k_lens=(340, 16, 900), tree_width=64))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [8, 130])  # the longer sequences are not cut
def test_a_sequence_has_the_same_bits_in_any_batch(q_len: int) -> None:
    case = replace(MIXED, q_lens=(q_len,) * 3, k_lens=(20000, 9000, q_len + 9))
    check(case, batch_invariant=True)
    q, keys, options = make_inputs(replace(case, padding=0), 0)
    given = {name: options[name] for name in PLANNED}
    plan = make_plan(q, keys, impl="gluon", batch_invariant=True, **given)
    together = attend(q, keys, plan=plan, **options)
    for seq in range(3):
        some = slice(q_len * seq, q_len * (seq + 1))
        alone = replace_sequence(keys, seq)
        starts = torch.tensor([0, q_len], dtype=torch.int32, device="cuda")
        own = {**given, "cu_seqlens_q": starts}
        plan = make_plan(q[some], alone, impl="gluon", batch_invariant=True, **own)
        state = attend(q[some], alone, plan=plan, **{**options, "cu_seqlens_q": starts})
        assert torch.equal(state.out, together.out[some])
        assert torch.equal(state.lse, together.lse[some])


def replace_sequence(keys, seq: int):
    return replace(
        keys, page_table=keys.page_table[seq : seq + 1], seq_lens=keys.seq_lens[seq : seq + 1]
    )


@hopper
@pytest.mark.gpu
def test_fuzz() -> None:
    draw = random.Random(0)
    for seed in range(40):
        num_seqs = draw.randint(1, 5)
        q_lens = tuple(draw.choice([0, 1, 2, 7, 31, 65, 128, 300]) for _ in range(num_seqs))
        k_lens = tuple(draw.choice([0, 1, 15, 16, 127, 129, 700, 3000]) for _ in range(num_seqs))
        if not any(q_lens):
            continue
        case = replace(
            MIXED,
            q_lens=q_lens,
            k_lens=k_lens,
            source=draw.choice(["dense", "ragged", "paged"]),
            window=draw.choice([None, None, 50]),
            sinks=draw.random() < 0.3,
            padding=draw.choice([0, 0, 200]),
        )
        check(case, seed, wide=seed % 2 == 0)


@hopper
@pytest.mark.gpu
def test_a_graph_is_right_at_other_lengths() -> None:
    q, keys, options = make_inputs(replace(MIXED, padding=0), 0)
    graph = torch.cuda.CUDAGraph()
    attend(q, keys, impl="gluon", **options)
    with torch.cuda.graph(graph):
        state = attend(q, keys, impl="gluon", **options)
    for k_lens in ((7, 300, 31, 64, 0, 0), (130, 1, 600, 0, 77, 0)):
        keys.seq_lens.copy_(torch.tensor(k_lens, dtype=torch.int32))
        graph.replay()
        assert_right(state, q, keys, options)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_out_is_written_where_it_is_given(offset: int) -> None:
    q, keys, options = make_inputs(MIXED, 0)
    room = torch.full((q.shape[0], q.shape[1], 130), torch.nan, dtype=BRAIN, device="cuda")
    lse = torch.full(q.shape[:2], torch.nan, device="cuda")
    out = AttentionState(room[..., offset : 128 + offset], lse)
    state = attend(q, keys, impl="gluon", out=out, **options)
    assert_right(state, q, keys, options)
    assert state.out.data_ptr() == out.out.data_ptr()


@hopper
@pytest.mark.gpu
def test_keys_by_heads_and_wide_queries() -> None:
    q, keys, options = make_inputs(replace(MIXED, source="ragged"), 0)
    wide = torch.cat([q, q], 2)[..., :128]
    by_heads = replace(
        keys,
        k=keys.k.transpose(0, 1).contiguous().transpose(0, 1),
        v=keys.v.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert_right(attend(wide, by_heads, impl="gluon", **options), q, keys, options)


@hopper
@pytest.mark.gpu
def test_what_runs_where() -> None:
    q, keys, options = make_inputs(MIXED, 0)
    given = {name: options[name] for name in PLANNED}
    assert make_plan(q, keys, **given).impl == "gluon"
    decode, some, chosen = make_inputs(replace(MIXED, q_lens=(1,) * 6, padding=0), 0)
    given = {name: chosen[name] for name in PLANNED}
    assert make_plan(decode, some, **given).impl == "triton"
    small, some, chosen = make_inputs(replace(MIXED, page_size=8), 0)
    given = {name: chosen[name] for name in PLANNED}
    assert make_plan(small, some, **given).impl == "triton"
    with pytest.raises(ValueError, match="at least 16 keys, got 8"):
        make_plan(small, some, impl="gluon", **given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_another_device_is_refused() -> None:
    q, keys, options = make_inputs(replace(MIXED, device="cpu", dtype=HALF), 0)
    with pytest.raises(ValueError, match=r"needs a Hopper GPU .*, got q on cpu"):
        attend(q, keys, impl="gluon", **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "window", "is_cut"),
    [
        ((8,), (32768,), None, True),  # one block: all processors share its keys
        ((300, 1), (300, 20000), None, True),  # the long one is cut, the others are not
        ((0, 3, 5), (0, 7, 0), None, False),
        ((700,), (1500,), 100, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed_parts", [False, True])
def test_items_cover_every_tile_once(
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...],
    window: int | None,
    is_cut: bool,
    fixed_parts: bool,
) -> None:
    constants = constants_of(num_kv_heads=2, fixed_parts=fixed_parts)
    buffer, slots = ordered(q_lens, k_lens, window, constants)
    items = items_of(buffer)
    records = buffer[-cut_ints(slots) :].view(-1, CUT.value).tolist()  # for the launch that merges
    cut = [record[:5] for record in takewhile(lambda record: record[3], records)]
    assert not any(record[3] for record in records[len(cut) :])
    assert len(records) > len(cut)
    firsts = [item for item in items if item[8] > 1 and item[7] == 0]
    assert sorted(cut) == sorted([*item[1:4], *item[8:10]] for item in firsts)
    firsts = [item[6] for item in items if item[7] == 0]  # of a cut block, its other parts follow
    assert firsts == sorted(firsts, reverse=True)
    blocks: dict[tuple[int, int], list[list[int]]] = {}
    for item in items:
        blocks.setdefault((item[0], item[1]), []).append(item)
    used = [item[9] + item[7] for item in items if item[8] > 1]
    assert len(used) == len(set(used))
    assert all(slot < slots for slot in used)
    assert bool(used) == is_cut
    for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        for first_row in range(0, q_len * 4, 128):
            parts = sorted(blocks.pop((seq, first_row)), key=lambda item: item[7])
            assert [part[7] for part in parts] == list(range(parts[0][8]))
            assert all(a[5] + a[6] == b[5] for a, b in pairwise(parts))
            if fixed_parts:  # as the block's own length says
                num_tiles = sum(part[6] for part in parts)
                size = num_tiles if q_len * 4 >= 512 else max(8, -(-num_tiles // 64))
                assert len(parts) == -(-num_tiles // size)
            last_token = min(first_row + 128, q_len * 4) // 4 - 1
            first_seen = k_len - q_len + first_row // 4 - (window or k_len) + 1
            stop = max(min(k_len - q_len + last_token + 1, k_len), 0)
            start = min(max(first_seen, 0), stop) // 128 if window else 0
            assert parts[0][5] == start
            assert parts[-1][5] + parts[-1][6] == max(-(-stop // 128), start + 1)
    assert not blocks


def test_batch_invariant_plans_have_one_program() -> None:
    """A batch of many long prompts, none of which is cut, and one that would be."""
    layouts: list[HopperLayout] = []
    for num_seqs, q_len in ((8, 700), (1, 8)):
        case = replace(MIXED, q_lens=(q_len,) * num_seqs, k_lens=(700,) * num_seqs, device="cpu")
        q, keys, options = make_inputs(replace(case, padding=0), 0)
        queries = Queries(q, options["cu_seqlens_q"], q_len, num_seqs)
        call = AttendCall(queries, keys, Rules(causal=True, scale=1.0), keys.view())
        layouts.append(lay_out(call, PlanOptions(batch_invariant=True)))
    assert layouts[0].program is layouts[1].program


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ((256,), (2304,)),
        ((12,) * 50, tuple(range(76, 4576, 90))),
        ((512, *[1] * 20), (9000, *range(500, 20500, 1000))),
        ((1550,), (1677,)),
        ((6,) * 8, (881,) * 8),
        ((583, 1, 1, 1), (25143, 40, 9000, 3000)),
    ],
    ids=str,
)
def test_cuts_end_about_as_soon_as_the_best(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...]
) -> None:
    """By a simulation of programs that take the longest item first, at the prices of items."""
    constants = constants_of(num_kv_heads=8)
    buffer, slots = ordered(q_lens, k_lens, None, constants)
    items = items_of(buffer)
    blocks: dict[tuple[int, int], int] = {}
    for item in items:
        place = (item[0], item[1])
        blocks[place] = blocks.get(place, 0) + item[6]
    times: list[float] = []
    for cuts in range(1, 65):
        limit = -(-max(blocks.values()) // cuts)
        cut = {place: -(-tiles // limit) for place, tiles in blocks.items()}
        if cuts == 1 or sum(parts for parts in cut.values() if parts > 1) <= slots:
            sizes = [
                -(-blocks[place] // parts) for place, parts in cut.items() for _ in range(parts)
            ]
            times.append(end_of(sizes, constants, is_cut=cuts > 1))
    is_cut = any(item[8] > 1 for item in items)
    assert end_of([item[6] for item in items], constants, is_cut=is_cut) < 1.25 * min(times)


def test_orders_of_all_models_share_programs() -> None:
    """One more model compiles another order or merge only where its rows lie in other packs."""
    few, many = constants_of(2), constants_of(16)
    pages = replace(many, page_size=16, dk_rest=64, q_columns=0)
    assert asdict(order_constants(few)) == asdict(order_constants(many))
    assert asdict(merge_constants(many)) == asdict(merge_constants(pages))
    # of integers in tuples Triton tells apart those that are 1 or that 16 divides
    assert all(type(x) is float for each in (few, many) for x in pack_facts(each))


def constants_of(num_kv_heads: int, *, fixed_parts: bool = False) -> HopperConstants:
    """Four heads of 128 for each kv head, on an H200."""
    return hopper_constants(
        select_tiles(128, 128),
        causal=True,
        packing=Packing(4, 4),
        num_heads=4 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        page_size=0,
        head_dim_k=128,
        head_dim_v=128,
        num_programs=132,
        fixed_parts=fixed_parts,
    )


def end_of(sizes: list[int], constants: HopperConstants, *, is_cut: bool) -> float:
    """In tiles."""
    prices, busy = cut_prices(constants), [0.0] * constants.num_programs
    for size in sorted(sizes, reverse=True):
        for _ in range(constants.num_packs):
            heapq.heapreplace(busy, busy[0] + size + prices.item / TILE_PRICE)
    return max(busy) + is_cut * prices.merge / TILE_PRICE


def items_of(buffer: torch.Tensor) -> list[list[int]]:
    items = buffer[HEADER.value :][: int(buffer[0]) * ITEM.value].view(-1, ITEM.value)
    return items.tolist()


def ordered(q_lens, k_lens, window, constants) -> tuple[torch.Tensor, int]:
    """The order of a batch, as the device would leave it, and its slots."""
    starts = torch.tensor([*accumulate(q_lens, initial=0)], dtype=torch.int32)
    num_tokens, capacity = sum(q_lens), max(k_lens)
    slots = num_slots(len(q_lens), num_tokens, capacity, constants)
    buffer = torch.full(
        (order_size(len(q_lens), num_tokens, slots, constants),), -7, dtype=torch.int32
    )
    lens = torch.tensor(k_lens, dtype=torch.int32)
    call = call_of_lengths(num_tokens, starts, lens, None, capacity, window)
    order(buffer, starts.clone(), call, slots, constants)
    return buffer, slots
