"""LatentKV: rows that are key and value, by the property of attend() and in every producer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import GPU, ON_CPU, Case, assert_right, every_producer, integers, make_inputs

from anabranch import AttentionState, LatentKV, append_kv, attend, make_plan, merge, reference
from anabranch.kernels.config import AttendConfig, select_attend
from anabranch.kernels.load.arguments import box_keys, boxes_of
from anabranch.kernels.triton import plan as triton_plan

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LATENT = Case(source="latent", num_kv_heads=1, dims=(48, 32), group=16, padding=1)
MIXED = {"q_lens": (1, 8, 0, 3, 2), "k_lens": (70, 33, 5, 1, 0)}
FEW_ROWS = AttendConfig(16, 32, 4, 2, 2, keys_first=True)
MANY_ROWS = AttendConfig(64, 16, 4, 2, 1, merge_rows=4, merge_batch=2)
PAIRED = replace(MANY_ROWS, lazy_peak=True, paired=True)
DEVICES = [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=GPU)]


def planned(
    q: torch.Tensor, keys: LatentKV, options: dict[str, Any], impl: str, **given: object
) -> Any:
    names = ("cu_seqlens_q", "causal", "window", "tree_mask")
    return make_plan(q, keys, impl=impl, **{name: options[name] for name in names}, **given)


def check(case: Case, impl: str, **given: object) -> None:
    q, keys, options = make_inputs(case, 0)
    plan = planned(q, keys, options, impl, **given) if given else None
    assert_right(attend(q, keys, plan=plan, impl=impl, check=True, **options), q, keys, options)


@every_producer
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("num_heads", [1, 7, 16, 128])
def test_pages_and_heads(num_heads: int, page_size: int, impl: str, device: str) -> None:
    dtype = HALF if page_size > 1 else SINGLE
    case = replace(LATENT, group=num_heads, page_size=page_size, dtype=dtype, device=device)
    lengths = MIXED if num_heads < 128 else {"q_lens": (1, 2), "k_lens": (70, 3)}
    check(replace(case, **lengths), impl)


@every_producer
@pytest.mark.parametrize(
    "dims", [(576, 512), (320, 256), (288, 256), (40, 24), (72, 72), (128, 64)], ids=str
)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_widths(dims: tuple[int, int], dtype: torch.dtype, impl: str, device: str) -> None:
    """Values that are the main tile of the keys, and values that are only some of its columns."""
    lengths = {"q_lens": (1, 3), "k_lens": (35, 17)}
    check(replace(LATENT, dims=dims, dtype=dtype, device=device, **lengths), impl)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.05, 3.0], ids="scale {}".format)
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("dims", [(48, 32), (64, 16)], ids=str)
def test_lazy_peak(dims: tuple[int, int], page_size: int, scale: float, device: str) -> None:
    """Peaks that are kept and peaks that grow by far more than 8 bits, in one tile or several."""
    lengths = {"q_lens": (1, 3, 1), "k_lens": (90, 35, 0)}
    case = replace(LATENT, dims=dims, scale=scale, page_size=page_size, device=device, **lengths)
    config = replace(MANY_ROWS, lazy_peak=True)
    check(replace(case, dtype=HALF), "triton", config=config)
    check(replace(case, sinks=True, window=50), "triton", config=config)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [8, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_paired_blocks(num_heads: int, page_size: int, device: str) -> None:
    """Blocks of 64 heads side by side, over pages that are boxes and pages that are not."""
    case = replace(LATENT, group=num_heads, page_size=page_size, dtype=HALF, device=device)
    case = replace(case, q_lens=(1, 3, 0, 1, 2), k_lens=(150, 33, 5, 0, 64))
    check(case, "triton", config=PAIRED)
    check(replace(case, scale=3.0), "triton", config=replace(PAIRED, block_n=32))
    rules = replace(case, window=40, softcap=5.0, sinks=True)
    check(rules, "triton", config=PAIRED, batch_invariant=True)
    coded = replace(rules, formats=("fp8", "fp8"))
    check(coded, "triton", config=PAIRED, fused_merge=False)


@ON_CPU
def test_pages_that_are_boxes() -> None:
    """Whole tiles of 16-bit numbers that lie at equal distances of 16 bytes, in paired blocks."""

    def boxes(case: Case, config: AttendConfig, width: int | None = None) -> bool:
        q, keys, options = make_inputs(case, 0)
        if width is not None:
            wide = keys.cache.new_zeros(*keys.cache.shape[:2], width)
            keys = LatentKV(wide[..., :48], keys.page_table, keys.seq_lens, 32)
        plan = planned(q, keys, options, "triton", config=config)
        found = boxes_of(keys.view(), plan.work.program.constants) is not None
        assert not found or box_keys(keys.view()) == case.page_size
        return found

    case = replace(LATENT, page_size=64, dtype=HALF)
    assert boxes(case, PAIRED) and boxes(case, PAIRED, width=56)
    assert not boxes(case, PAIRED, width=52)
    assert not boxes(case, replace(PAIRED, paired=False))
    assert not boxes(case, replace(PAIRED, block_m=32))
    assert not boxes(replace(case, page_size=8), PAIRED)
    assert not boxes(replace(case, dtype=SINGLE), PAIRED)
    assert not boxes(replace(case, dims=(64, 16)), PAIRED)
    assert not boxes(replace(case, formats=("int8", "int8")), PAIRED)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [MANY_ROWS, PAIRED], ids=["", "paired"])
def test_shares_that_begin_at_blocks(config: AttendConfig, device: str) -> None:
    """Shares no longer than the price of a block, which is then paid in the share before."""
    config = replace(config, aligned_growth=50, deals=False)
    case = replace(LATENT, q_lens=(1, 1), k_lens=(40, 10), dtype=HALF, device=device)
    check(case, "triton", config=config)
    lengths = {"q_lens": (1, 2, 0, 3, 2, 1), "k_lens": (200, 33, 5, 1, 0, 60)}
    check(replace(case, group=128, **lengths), "triton", config=config)


@GPU
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("more", [(), (129, 64, 63, 65, 1)], ids=["few", "many"])
def test_bfloat16(more: tuple[int, ...], num_heads: int, page_size: int) -> None:
    case = replace(LATENT, dims=(576, 512), group=num_heads, page_size=page_size, dtype=BRAIN)
    lengths = {"q_lens": (1, 8, 0, 3, 2, *(1 for _ in more)), "k_lens": (4000, 333, 5, 1, 0, *more)}
    check(replace(case, device="cuda", **lengths), "triton")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [{}, {"leave_empty": True}, {"fused_merge": True}], ids=str)
def test_few_sequences_merge_apart(given: dict[str, Any], device: str) -> None:
    """By default; the parts go on from prior states as well."""
    case = replace(LATENT, dims=(576, 512), group=64, page_size=16, dtype=HALF, padding=0)
    case = replace(case, q_lens=(1, 1), k_lens=(340, 3), causal=False, device=device)
    q, keys, options = make_inputs(case, 0)
    before = replace_table(keys, keys.page_table[:, :1], keys.seq_lens.clamp(max=16))
    rest = replace_table(
        keys, keys.page_table[:, 1:].contiguous(), (keys.seq_lens - 16).clamp(min=0)
    )
    plan = planned(q, rest, options, "triton", **given)
    merging = plan.work.program.constants.merging
    assert merging.fused == given.get("fused_merge", False)
    states = {name: options[name] for name in ("cu_seqlens_q", "causal", "scale")}
    out, lse = reference.attend(q, before, **states)
    prior = AttentionState(out.to(device, HALF), lse.to(device, SINGLE))
    state = attend(q, rest, plan=plan, impl="triton", prior=prior, **options)
    assert_right(state, q, keys, options)
    own = attend(q, rest, plan=plan, impl="triton", **options)
    assert_right(own, q, rest, options)


@ON_CPU
def test_fixed_parts_are_merged_as_anywhere() -> None:
    """Tiles of a batch-invariant plan do not depend on how few sequences there are."""
    case = replace(LATENT, dims=(576, 512), group=64, dtype=HALF, q_lens=(1,), k_lens=(9,))
    q, keys, options = make_inputs(case, 0)
    plan = planned(q, keys, options, "triton", batch_invariant=True)
    assert plan.work.program.constants.merging.fused


@every_producer
@pytest.mark.parametrize(
    "options",
    [{"window": 9}, {"sinks": True, "causal": False}, {"softcap": 5.0}, {"tree_width": 3}],
    ids=str,
)
def test_options(options: dict[str, Any], impl: str, device: str) -> None:
    check(replace(LATENT, dtype=HALF, device=device, **MIXED, **options), impl)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [FEW_ROWS, MANY_ROWS], ids=["few rows", "many rows"])
@pytest.mark.parametrize("fused_merge", [True, False])
def test_keys_are_cut_and_merged(fused_merge: bool, config: AttendConfig, device: str) -> None:
    case = replace(LATENT, q_lens=(1, 4), k_lens=(200, 90), dtype=HALF, device=device)
    check(case, "triton", config=config, fused_merge=fused_merge)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_invariance(device: str) -> None:
    """With fixed parts a sequence alone has the same bits as in a batch."""
    case = replace(LATENT, q_lens=(2, 2, 2), k_lens=(130, 17, 70), dtype=HALF, padding=0)
    q, keys, options = make_inputs(replace(case, device=device), 0)
    given = {"batch_invariant": True, "config": replace(MANY_ROWS, part_tiles=1)}
    together = attend(
        q, keys, plan=planned(q, keys, options, "triton", **given), impl="triton", **options
    )
    assert_right(together, q, keys, options)
    for seq in range(3):
        tokens = slice(2 * seq, 2 * seq + 2)
        row = slice(seq, seq + 1)
        own = replace_table(keys, keys.page_table[row], keys.seq_lens[row])
        options["cu_seqlens_q"] = integers(replace(case, device=device), [0, 2])
        plan = planned(q[tokens], own, options, "triton", **given)
        alone = attend(q[tokens], own, plan=plan, impl="triton", **options)
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine, theirs[tokens])


def replace_table(keys: LatentKV, table: torch.Tensor, seq_lens: torch.Tensor) -> LatentKV:
    return LatentKV(keys.cache, table, seq_lens, keys.head_dim_v)


@every_producer
def test_parts_merge_to_the_whole(impl: str, device: str) -> None:
    """States over the first pages and over the rest, merged."""
    case = replace(LATENT, q_lens=(1, 1), k_lens=(40, 37), causal=False, padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    first = replace_table(keys, keys.page_table[:, :2].clone(), torch.full_like(keys.seq_lens, 16))
    rest = replace_table(keys, keys.page_table[:, 2:].contiguous(), keys.seq_lens - 16)
    parts = [attend(q, part, impl=impl, **options) for part in (first, rest)]
    assert_right(AttentionState(*merge(*parts)), q, keys, options)


@every_producer
def test_compiled_whole(impl: str, device: str) -> None:
    case = replace(LATENT, q_lens=(1, 1), k_lens=(9, 20), padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    rows = torch.randn(2, 48, device=device)
    slots = torch.tensor([3, -1], device=device)

    def step(q: torch.Tensor, keys: LatentKV, rows: torch.Tensor) -> AttentionState:
        append_kv(keys, rows, None, slots, impl=impl)
        return attend(q, keys, impl=impl, scale=options["scale"])

    backend = "aot_eager" if device == "cpu" else "inductor"
    state = torch.compile(step, fullgraph=True, backend=backend)(q, keys, rows)
    assert torch.equal(keys.cache.flatten(0, 1)[3], rows[0])
    assert_right(state, q, keys, options)


@GPU
@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize(("num_heads", "page_size"), [(16, 16), (128, 64)])
def test_graph_replays_with_other_lengths(num_heads: int, page_size: int, impl: str | None) -> None:
    case = replace(LATENT, dims=(576, 512), dtype=BRAIN, device="cuda", padding=0)
    case = replace(case, group=num_heads, page_size=page_size)
    q, keys, options = make_inputs(replace(case, q_lens=(1,) * 3, k_lens=(900, 64, 300)), 0)
    attend(q, keys, impl=impl, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = attend(q, keys, impl=impl, **options)
    for lengths in ([900, 64, 300], [1, 0, 299], [17, 63, 16]):
        keys.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert_right(state, q, keys, options)


@every_producer
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
def test_append(num_tokens: int, impl: str, device: str) -> None:
    cache = torch.full((4, 8, 40), torch.nan, dtype=HALF, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    keys = LatentKV(cache, none[:, None], none, 32)
    rows = torch.randn(40, num_tokens, device=device).to(HALF).T  # columns outermost
    slots = torch.randperm(32, device=device)[:num_tokens]
    slots[::3] = -1
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 8, slot % 8] = rows[token]
    append_kv(keys, rows, None, slots, check=True, impl=impl)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def test_tiles_hold_latent_rows() -> None:
    """Fewer heads with more tokens fill the tile of 64 rows too."""
    rows = {}
    for num_heads, q_len in ((16, 1), (16, 2), (16, 4), (128, 1)):
        config = select_attend(
            rows_per_seq=num_heads * q_len, num_pairs=64, head_dim_k=576, head_dim_v=512,
            itemsize=2, latent=True,
        )  # fmt: skip
        rows[num_heads, q_len] = config.block_m
    assert rows == {(16, 1): 16, (16, 2): 32, (16, 4): 64, (128, 1): 64}


@ON_CPU
@pytest.mark.parametrize(("head_dim_v", "block_n"), [(512, 64), (256, 32)])
def test_room_for_values_beside_keys(
    head_dim_v: int, block_n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are not the main tile of the keys take room of their own, on Hopper's 227 KiB."""
    monkeypatch.setattr(triton_plan, "shared_memory", lambda device: (232448, 233472))
    case = replace(LATENT, dims=(576, head_dim_v), group=64, dtype=HALF, q_lens=(1,), k_lens=(9,))
    q, keys, options = make_inputs(case, 0)
    plan = planned(q, keys, options, "triton")
    assert plan.work.program.constants.tiles.block_n == block_n


def test_tiles_by_pages_and_sequences() -> None:
    """Blocks are paired where pages hold whole tiles, and few sequences of few rows merge apart."""

    def select(num_pairs: int, rows: int = 128, **given: Any) -> tuple[bool, bool]:
        config = select_attend(
            rows_per_seq=rows, num_pairs=num_pairs, head_dim_k=576, head_dim_v=512, itemsize=2,
            latent=True, **given,
        )  # fmt: skip
        return config.paired, config.fused_merge

    assert select(64, box_keys=64) == select(64, box_keys=128) == (True, True)
    assert select(64) == select(64, box_keys=32) == select(64, box_keys=96) == (False, True)
    assert select(64, fused_merge=False) == (False, True)
    assert select(1) == select(8, box_keys=64) == (True, False)
    assert select(1, quantised=True) == (False, False)
    assert select(1, fused_merge=True) == select(1, rows=4096) == (False, True)
    assert select(1, rows=4096, box_keys=64) == (True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache": torch.zeros(4, 8, 1, 40)},
            r"cache must be \[num_pages, page_size, head_dim_k\]",
        ),
        ({"head_dim_v": 0}, "head_dim_v must be from 1 to the 40 columns of the cache, got 0"),
        ({"head_dim_v": 41}, "head_dim_v must be from 1 to the 40 columns of the cache, got 41"),
        ({"cache": torch.zeros(4, 0, 40)}, r"at least one key, got cache \(4, 0, 40\)"),
        ({"cache": torch.zeros(4, 8, 40).double()}, "cache must be one of .*, got torch.float64"),
        ({"seq_lens": torch.zeros(2).int()}, "seq_lens has num_seqs = 2, but page_table has"),
        ({"page_table": torch.zeros(1, 1)}, "page_table must be one of int32"),
        ({"query_dtype": HALF}, "cache must be one of float16, got torch.float32"),
    ],
    ids=str,
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    given = {"cache": torch.zeros(4, 8, 40), "page_table": none[:, None], "seq_lens": none}
    with pytest.raises(ValueError, match=message):
        LatentKV(**(given | {"head_dim_v": 32} | changes))


def test_refuses_queries_and_rows_of_other_widths() -> None:
    none = torch.zeros(1, dtype=torch.int32)
    keys = LatentKV(torch.zeros(4, 8, 40), none[:, None], none, 32)
    with pytest.raises(ValueError, match="k has head_dim_k = 40, but q has head_dim_k = 48"):
        attend(torch.zeros(1, 16, 48), keys)
    with pytest.raises(
        ValueError, match=r"k has head_dim_k = 48, but keys\.cache has head_dim_k = 40"
    ):
        append_kv(keys, torch.zeros(1, 48), None, none)
    with pytest.raises(ValueError, match=r"v must be None: a row of LatentKV holds both, got \(1,"):
        append_kv(keys, torch.zeros(1, 40), torch.zeros(1, 32), none)
    with pytest.raises(ValueError, match="v must have a head dim from 1 to 512, got 520"):
        wide = LatentKV(torch.zeros(4, 8, 576), none[:, None], none, 520)
        attend(torch.zeros(1, 16, 576), wide, impl="triton")
