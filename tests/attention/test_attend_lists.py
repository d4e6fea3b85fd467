"""Short lists, which are attended to without a schedule: the property of test_selected.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, make_inputs
from test_selected import Lists, assert_right, check, exact, make_lists
from tolerance import assert_state_close

from anabranch import AttentionState, SelectedKV, attend, make_plan, merge
from anabranch.kernels.config import AttendConfig
from anabranch.kernels.list_config import select_lists
from anabranch.kernels.triton import plan as plan_module

GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=GPU)]
)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
# Parts are of 32 keys in float32, of 128 keys in 16 bits.
WIDTH, COUNTS = 100, (97, 0, 32, 1, 100, 33)
BASE = Case(q_lens=(1,), k_lens=(120,), num_kv_heads=3, dims=(16, 16), group=2, padding=0)


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as on a GPU, so that lists of small tests are short ones."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan_module, "num_sms", lambda _: 132)


def is_uniform(q: torch.Tensor, selected: SelectedKV, **options: Any) -> bool:
    plan = make_plan(q, selected, impl="triton", **options)
    return plan.work.program.constants.division.uniform


def check_short(case: Case, lists: Lists, **options: Any) -> None:
    """By the kernel that is meant."""
    q, base, _ = make_inputs(replace(case, padding=0), 0)
    assert is_uniform(q, make_lists(base, q.shape[1], len(q), lists))
    check(case, lists, "triton", **options)


@every_device
@pytest.mark.parametrize(
    ("source", "page_size", "per_token"),
    [
        ("dense", 1, "head"),
        ("paged", 16, "kv head"),
        ("paged", 1, "head"),
        ("paged by heads", 3, "kv head"),
    ],
)
def test_sources(source: str, page_size: int, per_token: str, device: str) -> None:
    case = replace(BASE, source=source, page_size=page_size, device=device)
    check_short(case, Lists(per_token, WIDTH, COUNTS))


@every_device
@pytest.mark.parametrize(
    ("dims", "group", "per_token"),
    [((40, 24), 3, "kv head"), ((24, 192), 3, "kv head"), ((24, 72), 1, "head")],
)
def test_halves(dims: tuple[int, int], group: int, per_token: str, device: str) -> None:
    """Odd groups and head dims, two tiles a part."""
    case = replace(BASE, dims=dims, group=group, dtype=HALF, k_lens=(150,), device=device)
    check_short(case, Lists(per_token, 140, (129, 0, 64, 140, 128, 65)))


@every_device
@pytest.mark.parametrize(
    ("per_token", "options"), [("head", {}), ("kv head", {"softcap": 5.0})], ids=str
)
def test_log_weights(per_token: str, options: dict[str, Any], device: str) -> None:
    case = replace(BASE, page_size=3, device=device)
    check_short(case, Lists(per_token, WIDTH, COUNTS, weighted=True), **options)


@every_device
def test_tokens_with_lists_of_their_own(device: str) -> None:
    case = replace(BASE, q_lens=(1, 1), k_lens=(60, 50), page_size=3, device=device)
    check_short(case, Lists("kv head", 40, (40, 0, 33, 1)))
    check_short(case, Lists("kv head", 40, (40, 0, 33, 1), seqs=(1, 0)))


@every_device
def test_garbage_after_a_count(device: str) -> None:
    """It is not looked up, be it no key at all or a key that is not in the list."""
    case = replace(BASE, page_size=3, device=device)
    q, base, given = make_inputs(case, 0)
    selected = make_lists(base, q.shape[1], len(q), Lists("kv head", WIDTH, COUNTS))
    places = torch.arange(WIDTH, device=device)
    garbage = torch.tensor([-(1 << 31), 1 << 30, 119], device=device)[places % 3]
    indices = torch.where(places < selected.counts[..., None], selected.indices, garbage.int())
    selected = replace(selected, indices=indices)
    state = attend(q, selected, scale=given["scale"], impl="triton")
    assert_right(state, q, selected, given["scale"])


@every_device
def test_sinks(device: str) -> None:
    """One list a token and one head a list: then sinks are in the kernel, once for all parts."""
    case = replace(BASE, num_kv_heads=1, group=1, q_lens=(1, 1), k_lens=(120, 0), device=device)
    q, base, given = make_inputs(case, 0)
    selected = make_lists(base, 1, len(q), Lists("all", WIDTH, (100,)))
    assert is_uniform(q, selected)
    sinks = torch.randn(1, device=device)
    state = attend(q, selected, sinks=sinks, scale=given["scale"], impl="triton")
    with_sinks = []
    for dtype in (torch.float64, q.dtype):
        bare = exact(q, selected, dtype, given["scale"], None)
        sink = AttentionState(torch.zeros_like(bare.out), sinks.to(dtype).cpu().expand(2, 1))
        lse = torch.logaddexp(bare.lse, sink.lse)
        with_sinks.append(AttentionState(bare.out * torch.exp(bare.lse - lse)[..., None], lse))
    assert_state_close(state, *with_sinks)


@every_device
def test_prior_states(device: str) -> None:
    """Counted once, whatever the number of parts, and where a list is empty."""
    case = replace(BASE, page_size=3, device=device)
    q, base, given = make_inputs(case, 0)
    lists = [
        make_lists(base, q.shape[1], len(q), Lists("kv head", WIDTH, counts))
        for counts in (COUNTS, (5, 0, 40), (7, 9))
    ]
    impls = ("triton", None, None)
    states = [
        attend(q, x, scale=given["scale"], impl=impl) for x, impl in zip(lists, impls, strict=True)
    ]
    prior = AttentionState(*map(torch.stack, zip(*states[1:], strict=True)))
    state = attend(q, lists[0], scale=given["scale"], prior=prior, impl="triton")
    for mine, theirs in zip(state, merge(*states), strict=True):
        torch.testing.assert_close(mine, theirs)


@every_device
def test_layers_share_a_plan(device: str) -> None:
    """Counters are as they were after each call; wider lists than the plan has room for are not."""
    case = replace(BASE, page_size=3, device=device)
    q, base, given = make_inputs(case, 0)
    drawn = [
        make_lists(base, q.shape[1], len(q), Lists("kv head", width, counts))
        for width, counts in ((100, COUNTS), (31, (31, 0)), (100, (3, 100)))
    ]
    plan = make_plan(q, drawn[0], impl="triton")
    for selected in drawn:
        state = attend(q, selected, scale=given["scale"], plan=plan)
        assert_right(state, q, selected, given["scale"])
        assert not plan.work.parts.counters.any()
    wide = make_lists(base, q.shape[1], len(q), Lists("kv head", 129, (1,)))
    with pytest.raises(ValueError, match="lists of 4 parts at most, lists of width 129 have 5"):
        attend(q, wide, plan=plan)
    none = replace(drawn[0], indices=drawn[0].indices[..., :0])
    with pytest.raises(ValueError, match="short lists, got lists of width 0"):
        attend(q, none, plan=plan)


def test_what_is_left_to_the_schedule() -> None:
    q, base, _ = make_inputs(BASE, 0)
    lists = make_lists(base, 6, 1, Lists(width=WIDTH, counts=COUNTS))
    assert is_uniform(q, lists)
    assert not is_uniform(q, lists, batch_invariant=True)
    assert not is_uniform(q, lists, fused_merge=False)
    assert not is_uniform(q, lists, config=AttendConfig(16, 16, 4, 2, 1))
    assert not is_uniform(q, make_lists(base, 6, 1, Lists("all", WIDTH, COUNTS)))
    assert not is_uniform(q, make_lists(base, 6, 1, Lists(width=132 * 32 * 3, counts=(1,))))


def tiles(**changes: int) -> tuple[int, ...] | None:
    """Keys of a tile, warps, stages, tiles a part and programs a processor, on an H200."""
    call = {"group": 1, "num_lists": 32, "width": 640, "head_dim_k": 128, "head_dim_v": 128}
    gpu = {"itemsize": 2, "num_sms": 132, "per_program": 227 << 10, "per_sm": 228 << 10}
    x = select_lists(**(call | gpu | changes))
    return x and (x.block_n, x.num_warps, x.num_stages, x.part_tiles, x.workers_per_sm)


def test_tiles_are_selected_so_that_all_programs_fit() -> None:
    assert tiles() == (64, 4, 3, 2, 2)
    assert tiles(num_lists=52) == (64, 4, 3, 2, 2)  # 260 programs, there is room for 264
    assert tiles(num_lists=53) is None
    by_kv_head = {"group": 4, "num_lists": 8}
    assert tiles(**by_kv_head) == (128, 4, 2, 1, 1)
    assert tiles(**by_kv_head | {"num_lists": 26}) == (128, 4, 2, 1, 1)
    assert tiles(**by_kv_head | {"num_lists": 27}) == (64, 4, 2, 1, 3)
    assert tiles(**by_kv_head | {"num_lists": 40}) is None
    wide = {"head_dim_k": 256, "head_dim_v": 256, "num_lists": 8}
    assert tiles(**wide) == (32, 4, 3, 2, 2)
    assert tiles(**wide, group=4) == (64, 4, 2, 1, 1)
    assert tiles(itemsize=4, num_lists=8) == (32, 4, 2, 1, 3)
    small = {"per_program": 99 << 10, "per_sm": 100 << 10}  # sm_86
    assert tiles(**small, num_lists=8) == (64, 4, 2, 2, 1)
    assert tiles(group=17) is None and tiles(width=0) is None and tiles(num_lists=0) is None
    assert tiles(head_dim_k=576) is None


@GPU
@pytest.mark.parametrize("per_token", ["head", "kv head"])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("source", ["dense", "paged"])
def test_real_shapes(source: str, dim: int, per_token: str) -> None:
    case = Case(
        q_lens=(1,), k_lens=(3000,), source=source, page_size=16, num_kv_heads=8, group=4,
        dims=(dim, dim), dtype=BRAIN, device="cuda",
    )  # fmt: skip
    counts = (640, 0, 1, 63, 64, 65, 127, 128, 129, 500)
    width = 640 if dim == 128 or per_token == "kv head" else 256
    check_short(case, Lists(per_token, width, tuple(min(x, width) for x in counts)))


@GPU
@pytest.mark.parametrize("per_token", ["head", "kv head"])
def test_replayed_with_other_lists(per_token: str) -> None:
    """Without a plan, and with one made before the graph: it does not depend on counts."""
    case = Case(
        q_lens=(1,), k_lens=(900,), dims=(128, 128), dtype=BRAIN, group=4, num_kv_heads=8,
        page_size=16, device="cuda", padding=0,
    )  # fmt: skip
    q, base, given = make_inputs(case, 0)
    drawn = [
        make_lists(base, q.shape[1], 1, Lists(per_token, 300, counts))
        for counts in ((300, 17, 0), (0,), (1, 64, 65, 299))
    ]
    held = replace(drawn[0], indices=drawn[0].indices.clone(), counts=drawn[0].counts.clone())
    assert is_uniform(q, held)
    plan = make_plan(q, held)
    attend(q, held, scale=given["scale"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = [attend(q, held, scale=given["scale"], plan=x) for x in (None, plan)]
    for lists in drawn:
        held.indices.copy_(lists.indices)
        held.counts.copy_(lists.counts)
        q.copy_(torch.randn_like(q))
        graph.replay()
        for state in states:
            assert_right(state, q, lists, given["scale"])
