"""Latent keys on a Hopper GPU by the property of attend(); the walk through a schedule anywhere."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, assert_right, make_inputs
from lengths import call_of_lengths

from anabranch import AttentionState, LatentKV, attend, make_plan
from anabranch.device import capability
from anabranch.kernels.gluon.latent_config import (
    LatentConstants,
    LatentTiles,
    latent_constants,
)
from anabranch.kernels.schedule.schedule import schedule, schedule_size
from anabranch.kernels.schedule.walk import begin_share, take_item

HALF, BRAIN = torch.float16, torch.bfloat16
IS_HOPPER = torch.cuda.is_available() and capability(torch.device("cuda", 0))[0] == 9
hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
PLANNED = ("cu_seqlens_q", "causal", "window", "tree_mask")
MIXED = Case(
    q_lens=(1, 8, 0, 3, 2, 1),
    k_lens=(4000, 333, 5, 1, 0, 129),
    source="latent",
    page_size=64,
    num_kv_heads=1,
    group=16,
    dims=(576, 512),
    dtype=BRAIN,
    padding=3,
    device="cuda",
)
LONG = replace(MIXED, q_lens=(1, 2), k_lens=(20000, 4100))  # cut over keys


def check(case: Case, seed: int = 0, **planned: object) -> None:
    q, keys, options = make_inputs(case, seed)
    given = {name: options[name] for name in PLANNED}
    plan = make_plan(q, keys, impl="gluon", **given, **planned)
    for _ in range(2):  # counters are left as they were found
        assert_right(attend(q, keys, plan=plan, **options), q, keys, options)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "page_size"),
    [
        *((heads, 64) for heads in (1, 7, 16, 20, 32, 64, 96, 128, 192)),
        *((heads, size) for heads in (20, 128) for size in (16, 32, 128)),
    ],
)
def test_pages_and_heads(num_heads: int, page_size: int) -> None:
    check(replace(MIXED, group=num_heads, page_size=page_size))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_cut_over_keys(dtype: torch.dtype, num_heads: int) -> None:
    check(replace(LONG, group=num_heads, dtype=dtype))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles",
    [
        LatentTiles(least_share=1),
        LatentTiles(least_share=16),
        LatentTiles(least_share=1, aligned_growth=0),
        LatentTiles(aligned_growth=50),
        LatentTiles(least_share=1, merge_patience=0),
        LatentTiles(merge_patience=1, merge_batch=4),
    ],
    ids=str,
)
def test_parts_of_any_size(tiles: LatentTiles) -> None:
    for group in (16, 64, 128):
        check(replace(LONG, group=group), config=tiles)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256])
def test_lengths_around_a_tile(length: int) -> None:
    """Memory after the last key is poison: neither its scores nor its values count."""
    lengths = {"q_lens": (1, 4), "k_lens": (length, length)}
    check(replace(MIXED, **lengths))
    check(replace(MIXED, page_size=16, group=64, **lengths))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "rules",
    [
        {"causal": False},
        {"window": 3},
        {"window": 200},
        {"softcap": 20.0},
        {"q_lens": (3, 4), "k_lens": (340, 900), "tree_width": 8},
    ],
    ids=str,
)
def test_rules(rules: dict[str, object]) -> None:
    check(replace(MIXED, **rules))
    check(replace(MIXED, group=128, **rules))


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_a_sequence_has_the_same_bits_in_any_batch(num_heads: int) -> None:
    case = replace(MIXED, group=num_heads, q_lens=(2, 2, 2), k_lens=(9000, 4097, 17), padding=0)
    check(case, batch_invariant=True)
    q, keys, options = make_inputs(case, 0)
    given = {name: options[name] for name in PLANNED}
    plan = make_plan(q, keys, impl="gluon", batch_invariant=True, **given)
    together = attend(q, keys, plan=plan, **options)
    for seq in range(3):
        tokens, row = slice(2 * seq, 2 * seq + 2), slice(seq, seq + 1)
        alone = LatentKV(keys.cache, keys.page_table[row], keys.seq_lens[row], 512)
        starts = torch.tensor([0, 2], dtype=torch.int32, device="cuda")
        own = {**given, "cu_seqlens_q": starts}
        plan = make_plan(q[tokens], alone, impl="gluon", batch_invariant=True, **own)
        state = attend(q[tokens], alone, plan=plan, **{**options, "cu_seqlens_q": starts})
        for mine, theirs in zip(state, together, strict=True):
            assert torch.equal(mine, theirs[tokens])


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_a_graph_is_right_at_other_lengths(num_heads: int) -> None:
    case = replace(MIXED, group=num_heads, q_lens=(1, 2, 1), k_lens=(6000, 640, 3000), padding=0)
    q, keys, options = make_inputs(case, 0)
    attend(q, keys, impl="gluon", **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = attend(q, keys, impl="gluon", **options)
    for k_lens in ((6000, 640, 3000), (1, 0, 2999), (129, 640, 64), (0, 0, 0)):
        keys.seq_lens.copy_(torch.tensor(k_lens, dtype=torch.int32))
        graph.replay()
        assert_right(state, q, keys, options)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 64])
@pytest.mark.parametrize("width", [512, 520, 513], ids=["flat", "wide rows", "not aligned"])
def test_out_is_written_where_it_is_given(width: int, num_heads: int) -> None:
    q, keys, options = make_inputs(replace(MIXED, group=num_heads), 0)
    room = torch.full((*q.shape[:2], width), torch.nan, dtype=BRAIN, device="cuda")
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device="cuda").T
    out = AttentionState(room[..., :512], lse)
    state = attend(q, keys, impl="gluon", out=out, **options)
    assert_right(state, q, keys, options)
    assert state.out.data_ptr() == room.data_ptr()
    assert room[..., 512:].isnan().all()


@hopper
@pytest.mark.gpu
def test_fuzz() -> None:
    draw = random.Random(0)
    for seed in range(30):
        num_seqs = draw.randint(1, 9)
        case = replace(
            MIXED,
            q_lens=tuple(draw.choice([0, 1, 1, 2, 5, 8]) for _ in range(num_seqs)),
            k_lens=tuple(draw.choice([0, 1, 64, 127, 700, 3000, 9000]) for _ in range(num_seqs)),
            group=draw.choice([8, 16, 48, 64, 128]),
            page_size=draw.choice([16, 32, 64]),
            window=draw.choice([None, None, 50]),
            padding=draw.choice([0, 0, 5]),
        )
        if any(case.q_lens):
            check(case, seed)


@hopper
@pytest.mark.gpu
def test_what_runs_where() -> None:
    q, keys, options = make_inputs(MIXED, 0)
    given = {name: options[name] for name in PLANNED}
    assert make_plan(q, keys, **given).impl == "gluon"
    one_by_one, some, chosen = make_inputs(replace(MIXED, page_size=1), 0)
    given = {name: chosen[name] for name in PLANNED}
    assert make_plan(one_by_one, some, **given).impl == "triton"
    with pytest.raises(ValueError, match="at least 16 keys, got 1"):
        make_plan(one_by_one, some, impl="gluon", **given)
    narrow, some, chosen = make_inputs(replace(MIXED, dims=(320, 256)), 0)
    given = {name: chosen[name] for name in PLANNED}
    with pytest.raises(ValueError, match="latent rows of 576/512 columns, got 320/256"):
        make_plan(narrow, some, impl="gluon", **given)


@triton.jit
def walk_kernel(schedule_ptr, items_ptr, counts_ptr, MOST: tl.constexpr, W: tl.constexpr):
    """Write the items of one worker, as a partition of the Hopper kernel walks through them."""
    worker = tl.program_id(0)
    spot = begin_share(worker, schedule_ptr, W)
    spot, item = take_item(spot, worker, schedule_ptr, W)
    count = 0
    while item.tile < item.stop:
        ptr = items_ptr + (worker * MOST + count) * 7
        tl.store(ptr, item.block.origin)
        tl.store(ptr + 1, item.block.first_row)
        tl.store(ptr + 2, item.tile)
        tl.store(ptr + 3, item.stop)
        tl.store(ptr + 4, item.part)
        tl.store(ptr + 5, item.num_parts)
        tl.store(ptr + 6, item.first_slot)
        count += 1
        spot, item = take_item(spot, worker, schedule_ptr, W)
    tl.store(counts_ptr + worker, count)


def walked(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], constants: LatentConstants
) -> list[list[list[int]]]:
    """The items of every worker: origin, first_row, tile, stop, part, num_parts, first_slot."""
    work, most = constants.work, 64
    starts = torch.tensor([*accumulate(q_lens, initial=0)], dtype=torch.int32)
    lens = torch.tensor(k_lens, dtype=torch.int32)
    buffer = torch.full((schedule_size(len(q_lens), sum(q_lens), work),), -7, dtype=torch.int32)
    call = call_of_lengths(sum(q_lens), starts, lens, None, max(k_lens), None)
    schedule(buffer, starts.clone(), call, work)
    num_workers = work.division.num_workers
    items = torch.full((num_workers, most, 7), -7, dtype=torch.int32)
    counts = torch.zeros(num_workers, dtype=torch.int32)
    walk_kernel[num_workers,](buffer, items, counts, most, work)
    return [items[worker, : counts[worker]].tolist() for worker in range(num_workers)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "num_heads"),
    [
        ((1,), (3000,), 128),  # all workers share one block
        ((1, 0, 2, 1, 3), (2000, 700, 130, 0, 1), 64),  # blocks without tokens and without keys
        ((1,) * 6, (512,) * 6, 128),  # whole blocks
        ((5, 1), (900, 2500), 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed_parts", [False, True])
def test_items_cover_every_tile_once(
    q_lens: tuple[int, ...], k_lens: tuple[int, ...], num_heads: int, fixed_parts: bool
) -> None:
    tiles = LatentTiles(least_share=3, part_tiles=2)
    constants = latent_constants(
        tiles, causal=True, num_heads=num_heads, page_size=16, num_programs=8,
        fixed_parts=fixed_parts,
    )  # fmt: skip
    workers = walked(q_lens, k_lens, constants)
    blocks: dict[tuple[int, int], list[list[int]]] = {}
    for worker, items in enumerate(workers):
        for item in items:
            assert fixed_parts or item[5] == 1 or item[4] + item[6] == worker
            blocks.setdefault((item[0], item[1]), []).append(item)
    group = constants.work.group
    for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        for first_row in range(0, q_len * group, 64):
            last_token = min(first_row + 64, q_len * group) - 1
            stop = k_len - q_len + last_token // group + 1
            num_tiles = max(-(-stop // 128), 0)
            parts = sorted(blocks.pop((seq, first_row), []), key=lambda item: item[4])
            assert sum(item[3] - item[2] for item in parts) == num_tiles
            if not num_tiles:
                continue
            assert parts[0][2] == 0
            assert [item[4] for item in parts] == list(range(parts[0][5]))
            assert all(before[3] == after[2] for before, after in pairwise(parts))
            if fixed_parts:
                assert all(item[3] - item[2] == 2 for item in parts[:-1])
    assert not blocks


def items_of_workers(
    k_lens: tuple[int, ...], aligned_growth: int, num_workers: int
) -> list[list[tuple[int, int]]]:
    """(sequence, tiles) of the items of every worker, decode with 64 heads."""
    tiles = LatentTiles(least_share=1, aligned_growth=aligned_growth, merge_price=2)
    constants = latent_constants(
        tiles, causal=True, num_heads=64, page_size=64, num_programs=num_workers
    )
    workers = walked((1,) * len(k_lens), k_lens, constants)
    return [[(item[0], item[3] - item[2]) for item in items] for items in workers]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's")
def test_a_worker_stays_in_one_block_if_shares_grow_little() -> None:
    two_of_eight = (8 * 128,) * 2
    assert items_of_workers(two_of_eight, 12, 5) == [[(0, 4)], [(0, 4)], [(1, 4)], [(1, 4)], []]
    assert any(len(items) == 2 for items in items_of_workers(two_of_eight, 0, 5))
    uneven = (9 * 128, 0, 3 * 128 - 5, 6 * 128)
    aligned = [[(0, 3)]] * 3 + [[(2, 3)]] + [[(3, 3)]] * 2
    assert items_of_workers(uneven, 12, 6) == aligned
    # Two tiles more are taken whatever their percentage; 16 instead of 12 would grow too much, and
    # three blocks are too many for two workers.
    assert items_of_workers(two_of_eight, 12, 3) == [[(0, 8)], [(1, 8)], []]
    assert any(len(items) == 2 for items in items_of_workers((16 * 128,) * 2, 12, 3))
    assert all(len(items) == 2 for items in items_of_workers((16 * 128,) * 3, 12, 2))
