"""attend() in Triton by one property: its parts, merged, equal the reference over all keys.

In the interpreter on the CPU, where three imaginary processors make pairs cross workers, and on a
GPU. The interpreter multiplies bfloat16 as integers, so that dtype has its cases on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from cases import (
    SOURCES,
    UNUSED_PAGE,
    Case,
    assert_right,
    integers,
    make_call,
    make_inputs,
    poisoned,
)
from configurations import every_attend_config
from hypothesis import given, settings
from hypothesis import strategies as st
from states import laid_out

from anabranch import (
    AttentionState,
    DenseKV,
    PagedKV,
    Plan,
    RaggedKV,
    attend,
    make_plan,
    merge,
    reference,
)
from anabranch.call import PlanOptions
from anabranch.kernels.config import AttendConfig
from anabranch.keys import KeySource, flatten_source
from anabranch.plan import plan_call

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=GPU)]
)
MIXED = {"q_lens": (0, 1, 3, 17), "k_lens": (5, 70, 33, 12)}
SHORT = AttendConfig(16, 64, 4, 3, 2, keys_first=True)
LONG = AttendConfig(64, 16, 4, 2, 1, merge_rows=16)  # full tiles, then masked ones
DEEP = AttendConfig(16, 16, 4, 2, 4, fan_in=2, merge_batch=1, block_price=1)
NARROW = AttendConfig(16, 16, 4, 2, 4, keys_first=True, merge_rows=2, merge_batch=3, block_price=0)
CONFIGS = [SHORT, LONG, DEEP, NARROW]
SELECTED = every_attend_config()


def tiles(value: AttendConfig | str) -> str:
    return value if isinstance(value, str) else f"{value.block_m} x {value.block_n}"


def plan_for(q: torch.Tensor, keys: KeySource, options: dict[str, Any], **planned: object) -> Plan:
    names = ("cu_seqlens_q", "causal", "window", "tree_mask")
    given = {name: options[name] for name in names}
    return make_plan(q, keys, impl="triton", **given, **planned)


def check(case: Case, seed: int = 0, **planned: object) -> None:
    q, keys, options = make_inputs(case, seed)
    plan = plan_for(q, keys, options, **planned) if planned else None
    assert_right(attend(q, keys, plan=plan, impl="triton", **options), q, keys, options)


@every_device
@pytest.mark.parametrize(
    ("source", "page_size", "dims", "group", "dtype"),
    [
        ("dense", 1, (40, 40), 1, SINGLE),
        ("dense", 1, (128, 128), 4, HALF),
        ("ragged", 1, (72, 72), 5, SINGLE),
        ("ragged", 1, (192, 128), 7, HALF),
        ("paged", 1, (80, 80), 8, SINGLE),
        ("paged", 8, (96, 96), 4, HALF),
        ("paged", 16, (256, 256), 4, SINGLE),
        ("paged by heads", 8, (128, 64), 5, HALF),
        ("paged by heads", 16, (40, 64), 1, SINGLE),
        ("paged k|v", 16, (64, 64), 7, HALF),
        ("paged k|v", 1, (64, 40), 1, HALF),
    ],
)
def test_sources(
    source: str, page_size: int, dims: tuple[int, int], group: int, dtype: torch.dtype, device: str
) -> None:
    kind = Case(source=source, page_size=page_size, dims=dims, group=group, dtype=dtype)
    check(replace(kind, **MIXED, device=device))


@GPU
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("source", SOURCES[:3])
def test_bfloat16(source: str, dims: tuple[int, int]) -> None:
    kind = Case(source=source, dims=dims, dtype=BRAIN, device="cuda", page_size=16, group=4)
    check(replace(kind, **MIXED))
    check(replace(kind, q_lens=(300, 1, 77), k_lens=(300, 129, 200)))


@every_device
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_64_heads_for_each_kv_head(num_kv_heads: int, device: str) -> None:
    kind = Case(group=64, num_kv_heads=num_kv_heads, dtype=HALF, dims=(40, 40), device=device)
    check(replace(kind, q_lens=(1, 3), k_lens=(17, 65)))


@every_device
@pytest.mark.parametrize("source", SOURCES[:3])
@pytest.mark.parametrize(
    "lengths",
    [
        {"q_lens": (1,) * 6, "k_lens": (0, 1, 31, 32, 33, 130)},
        {"q_lens": (3,) * 4, "k_lens": (7, 8, 9, 2)},
        {"q_lens": (40, 3), "k_lens": (20, 0)},
        {"q_lens": (33,), "k_lens": (70,)},
        {"q_lens": (0, 0), "k_lens": (7, 3)},
    ],
    ids=str,
)
def test_lengths(source: str, lengths: dict[str, tuple[int, ...]], device: str) -> None:
    check(Case(source=source, dims=(16, 16), device=device, **lengths))


@every_device
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("dense", {"causal": False}),
        ("paged", {"causal": False, "sinks": True}),
        ("ragged", {"window": 1}),
        ("dense", {"window": 20, "sinks": True}),
        ("paged", {"window": 20, "causal": False, "softcap": 5.0}),
        ("ragged", {"softcap": 5.0, "scale": 0.4}),
        ("paged", {"tree_width": 17}),
        ("dense", {"tree_width": 3, "sinks": True}),
        ("ragged", {"tree_width": 64, "softcap": 5.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [SHORT, LONG], ids=["short", "long"])
def test_options(source: str, options: dict[str, Any], config: AttendConfig, device: str) -> None:
    case = Case(source=source, dims=(16, 16), dtype=HALF, device=device, **MIXED, **options)
    check(case, config=config)


@every_device
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_caps_in_float32(softcap: float, device: str) -> None:
    """Logits far below the cap, and far above it, keep their digits."""
    check(Case(source="dense", dims=(16, 16), dtype=SINGLE, device=device, softcap=softcap))


@every_device
@pytest.mark.parametrize(
    ("config", "source"), [*zip([*CONFIGS, *SELECTED], cycle(SOURCES[:3]))], ids=tiles
)
def test_configurations(config: AttendConfig, source: str, device: str) -> None:
    lengths = {"q_lens": (1, 9, 0, 2), "k_lens": (150, 63, 3, 0)}
    case = Case(source=source, dims=(16, 32), dtype=HALF, group=4, device=device, **lengths)
    if device == "cuda" and config in SELECTED:  # as wide and as long as it can be
        _, _, dims, itemsize = SELECTED[config]
        dtype = BRAIN if itemsize == 2 else SINGLE
        case = replace(case, q_lens=(1, 70, 0, 2), dims=dims, dtype=dtype)
    check(case, config=config)


@every_device
@pytest.mark.parametrize(
    ("config", "source"), [*zip([SHORT, LONG, DEEP], SOURCES[:3], strict=True)], ids=tiles
)
def test_batch_invariance(config: AttendConfig, source: str, device: str) -> None:
    """With fixed parts a sequence alone has the same bits as in a batch."""
    config = replace(config, part_tiles=1)
    case = Case(
        source=source, q_lens=(3,) * 3, k_lens=(130, 17, 70), dims=(16, 16), dtype=HALF,
        device=device, padding=0,
    )  # fmt: skip
    q, keys, options = make_inputs(case, 0)
    plan = plan_for(q, keys, options, batch_invariant=True, config=config)
    together = attend(q, keys, plan=plan, impl="triton", **options)
    assert_right(together, q, keys, options)
    for seq in range(3):
        own, tokens = one_sequence(keys, seq), slice(3 * seq, 3 * seq + 3)
        options["cu_seqlens_q"] = integers(case, [0, 3])
        plan = plan_for(q[tokens], own, options, batch_invariant=True, config=config)
        alone = attend(q[tokens], own, plan=plan, impl="triton", **options)
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine, theirs[tokens])


@every_device
@pytest.mark.parametrize("config", [SHORT, LONG, DEEP], ids=tiles)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_merge_apart(batch_invariant: bool, config: AttendConfig, device: str) -> None:
    """Parts merged by a second launch give what parts merged by the last worker give."""
    case = Case(q_lens=(1, 30, 0), k_lens=(150, 70, 20), dims=(16, 16), dtype=HALF, device=device)
    config = replace(config, part_tiles=1)
    check(case, config=config, batch_invariant=batch_invariant, fused_merge=False)


@every_device
@pytest.mark.parametrize("fused", [True, False])
def test_an_infinite_value_stays_infinite(fused: bool, device: str) -> None:
    """In a merge of several parts, whose number is no multiple of those loaded at a time."""
    q = torch.randn(1, 2, 16, device=device)
    k, v = (torch.randn(1, 160, 2, 16, device=device) for _ in range(2))
    v[0, -1, 0, 3] = torch.inf
    keys = DenseKV(k, v)
    config = AttendConfig(16, 16, 4, 2, 4, merge_price=0, merge_batch=8)
    plan = make_plan(q, keys, impl="triton", config=config, fused_merge=fused)
    out = attend(q, keys, plan=plan, impl="triton").out
    assert out.isposinf().nonzero().tolist() == [[0, 0, 3]]
    assert not out.isnan().any()


@every_device
@pytest.mark.parametrize(
    ("lengths", "past", "programs", "dealt"),
    [
        ((90, 33, 64, 90, 0, 48, 2, 70), 0, 2, True),  # blocks of many lengths, and one of none
        ((100,) * 3, 0, 1, True),
        ((40,), 360, 8, False),  # fewer blocks than programs: cut
    ],
)
def test_blocks_dealt_out_whole(
    lengths: tuple[int, ...], past: int, programs: int, dealt: bool, device: str, monkeypatch: Any
) -> None:
    """Blocks of many rows go to programs whole where there are enough of them."""
    monkeypatch.setattr("anabranch.kernels.triton.plan.num_sms", lambda _: programs)
    keys_of = tuple(length + past for length in lengths)
    case = Case(q_lens=lengths, k_lens=keys_of, source="ragged", dims=(16, 16), dtype=HALF)
    q, keys, options = make_inputs(replace(case, device=device), 0)
    plan = plan_for(q, keys, options, config=LONG)
    assert (plan.work.schedule[5].item() > 0) == dealt
    assert_right(attend(q, keys, plan=plan, impl="triton", **options), q, keys, options)


@every_device
@pytest.mark.parametrize(("longest", "dealt"), [(40, True), (1000, False)])
def test_a_long_block_among_many_is_cut(
    longest: int, dealt: bool, device: str, monkeypatch: Any
) -> None:
    """Also where there are so many rounds that they are not added up."""
    monkeypatch.setattr("anabranch.kernels.triton.plan.num_sms", lambda _: 4)
    lengths = (longest, *(16,) * 129)
    case = Case(q_lens=(1,) * 130, k_lens=lengths, source="ragged", dims=(16, 16), dtype=HALF)
    q, keys, options = make_inputs(replace(case, device=device), 0)
    plan = plan_for(q, keys, options, config=LONG)
    assert (plan.work.schedule[5].item() > 0) == dealt


def one_sequence(keys: KeySource, seq: int) -> KeySource:
    if isinstance(keys, RaggedKV):
        return RaggedKV(keys.k, keys.v, keys.cu_seqlens[seq : seq + 2])
    own = keys.seq_lens[seq : seq + 1]
    if isinstance(keys, DenseKV):
        return DenseKV(keys.k[seq : seq + 1], keys.v[seq : seq + 1], own)
    return PagedKV(keys.k, keys.v, keys.page_table[seq : seq + 1], own)


def leaves_parts(plan: Plan) -> bool:
    """Whether a call has left parts to merge; fresh memory is NaN."""
    return not plan.work.parts.lses.isnan().all()


@every_device
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_share_a_plan(batch_invariant: bool, device: str) -> None:
    """Whoever merges the parts of a layer leaves the counters as the next layer needs them."""
    case = Case(q_lens=(1, 3), k_lens=(90, 40), dims=(16, 16), device=device)
    q, keys, options = make_inputs(case, 0)
    config = replace(DEEP, part_tiles=1)
    plan = plan_for(q, keys, options, batch_invariant=batch_invariant, config=config)
    assert not leaves_parts(plan)
    for layer in range(3):
        q, keys, options = make_inputs(case, layer)
        assert_right(attend(q, keys, plan=plan, impl="triton", **options), q, keys, options)
        assert leaves_parts(plan)
        assert not plan.work.parts.counters.any()


@every_device
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("config", [DEEP, NARROW], ids=tiles)
def test_a_sink_counts_once(config: AttendConfig, batch_invariant: bool, device: str) -> None:
    """However many parts a pair has."""
    case = Case(q_lens=(1, 2), k_lens=(90, 70), dims=(16, 16), sinks=True, device=device)
    q, keys, options = make_inputs(case, 0)
    options["sinks"] += 3
    config = replace(config, part_tiles=1)
    plan = plan_for(q, keys, options, batch_invariant=batch_invariant, config=config)
    assert_right(attend(q, keys, plan=plan, impl="triton", **options), q, keys, options)
    assert leaves_parts(plan)


@every_device
@pytest.mark.parametrize(
    ("source", "dims", "once"),
    [
        ("paged", (80, 64), True),
        ("dense", (64, 48), True),
        ("ragged", (80, 64), True),
        ("paged", (48, 16), False),  # the main part of a tile of keys has 32 columns
    ],
)
@pytest.mark.parametrize(
    "config", [SHORT, LONG, replace(LONG, values_first=True)], ids=["short", "long", "v first"]
)
def test_values_in_keys(
    source: str, dims: tuple[int, int], once: bool, config: AttendConfig, device: str
) -> None:
    """Values that are columns of the keys are not loaded again, where a tile holds just them."""
    kind = Case(source=source, dims=dims, group=4, num_kv_heads=1, dtype=HALF, device=device)
    q, keys, options = make_inputs(replace(kind, q_lens=(1, 20), k_lens=(70, 20)), 0)
    right = replace(keys, v=keys.k[..., : dims[1]])
    keys = replace(keys, v=torch.full_like(right.v, torch.nan)) if once else right
    call = make_call(q, keys, options)
    call = call._replace(view=call.view._replace(values_in_keys=True))
    plan = plan_call(call, PlanOptions(config=config), "triton")
    assert plan.work.program.constants.source.one_tile == once
    assert_right(plan.attend(call, None), q, right, options)


@every_device
def test_a_list_of_keys_for_each_query_head(device: str) -> None:
    """Tables of pages of one key, a row for each query head, which says the kv head as well."""
    num_seqs, num_heads, num_kv_heads, dim, num_slots = 2, 4, 2, 16, 30
    case = Case(device=device, dims=(dim, dim))
    k, v = torch.randn(2, num_slots, num_kv_heads, dim, device=device)
    q = torch.randn(num_seqs, num_heads, dim, device=device)
    lengths = [5, 0, 17, 30, 1, 16, 2, 9]
    table = torch.full((num_seqs * num_heads, num_slots), UNUSED_PAGE)
    parts = []
    for row, length in enumerate(lengths):
        slots, kv_head = torch.randperm(num_slots)[:length], row % num_heads // 2
        table[row, :length] = slots * num_kv_heads + kv_head
        own = (x[slots.to(device), kv_head, None] for x in (k, v))
        parts.append(reference.attention(q.view(-1, 1, 1, dim)[row], *own))
    pages = (x.view(-1, 1, 1, dim) for x in (k, v))
    lists = PagedKV(*pages, table.int().to(device), integers(case, lengths))
    state = attend(q.view(-1, 1, dim), lists, impl="triton")
    options = {"cu_seqlens_q": integers(case, range(9)), "causal": True, "window": None,
               "softcap": None, "scale": dim**-0.5, "sinks": None, "tree_mask": None}  # fmt: skip
    expected = AttentionState(*map(torch.cat, zip(*parts, strict=True)))
    assert_right(state, q.view(-1, 1, dim), lists, options, expected)


@every_device
def test_a_window_beyond_every_key(device: str) -> None:
    """Positions minus the window stay inside 32 bits, also where queries outnumber keys."""
    for window in (2**31 - 1, 2**31, 2**40):
        for source, config in (("ragged", SHORT), ("paged", LONG)):
            case = Case(source=source, dims=(16, 16), dtype=HALF, device=device, **MIXED)
            check(replace(case, window=window), config=config)


@every_device
@pytest.mark.parametrize("q_len", [1, 5])
def test_padded_queries(q_len: int, device: str) -> None:
    case = Case(q_lens=(q_len,) * 3, k_lens=(40, 0, 70), dims=(16, 16), padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    some = {name: options[name] for name in ("causal", "scale")}
    state = attend(q.unflatten(0, (3, q_len)), keys, impl="triton", **some)
    assert state.out.shape == (3, q_len, *q.shape[1:])
    assert_right(AttentionState(*(x.flatten(0, 1) for x in state)), q, keys, options)


@every_device
def test_strided_queries(device: str) -> None:
    case = Case(dims=(40, 40), device=device, **MIXED)
    q, keys, options = make_inputs(case, 0)
    wide = poisoned(case, q.shape[1], q.shape[0], 96)
    strided = wide.transpose(0, 1)[..., 3:83:2]
    strided.copy_(q)
    assert_right(attend(strided, keys, impl="triton", **options), q, keys, options)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy [..., tokens, heads, dims] with other strides, or beginning off a 16-byte boundary."""
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "packed":
        wide = x.new_full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan)
        return wide[..., x.shape[-1] : 2 * x.shape[-1]].copy_(x)
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@every_device
@pytest.mark.parametrize("layout", ["heads first", "packed", "misaligned"])
@pytest.mark.parametrize("source", SOURCES[:2])
def test_strided_keys(source: str, layout: str, device: str) -> None:
    """Where the tensor memory accelerator can copy tiles, and where it cannot."""
    lengths = {"q_lens": (70, 3), "k_lens": (90, 40)}
    case = Case(source=source, dims=(16, 16), dtype=HALF, group=1, device=device, **lengths)
    q, keys, options = make_inputs(case, 0)
    keys = replace(keys, k=in_layout(keys.k, layout), v=in_layout(keys.v, layout))
    plan = plan_for(q, keys, options, config=LONG)
    assert_right(attend(q, keys, plan=plan, impl="triton", **options), q, keys, options)


@every_device
def test_strided_sinks(device: str) -> None:
    case = Case(q_lens=(1, 3), k_lens=(40, 2), dims=(16, 16), sinks=True, device=device)
    q, keys, options = make_inputs(case, 0)
    sinks = options["sinks"].repeat_interleave(2)[::2]
    state = attend(q, keys, impl="triton", **(options | {"sinks": sinks}))
    assert_right(state, q, keys, options)


@every_device
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("source", SOURCES[:3])
def test_no_sequences(source: str, num_tokens: int, device: str) -> None:
    case = Case(source=source, q_lens=(1,), k_lens=(5,), device=device)
    _, keys, _ = make_inputs(case, 0)
    cut = {
        RaggedKV: lambda: RaggedKV(keys.k, keys.v, keys.cu_seqlens[:1]),
        DenseKV: lambda: DenseKV(keys.k[:0], keys.v[:0], keys.seq_lens[:0]),
        PagedKV: lambda: PagedKV(keys.k, keys.v, keys.page_table[:0], keys.seq_lens[:0]),
    }[type(keys)]()
    q = poisoned(case, num_tokens, 6, 64)
    state = attend(q, cut, cu_seqlens_q=integers(case, [0]), impl="triton")
    assert torch.equal(state.out, torch.zeros_like(q))
    assert (state.lse == -torch.inf).all()


@every_device
def test_long_queries_over_an_empty_storage(device: str) -> None:
    """No descriptor can be made of no keys."""
    q = torch.randn(70, 2, 64, device=device, dtype=HALF)
    none = torch.empty(0, 1, 64, device=device, dtype=HALF)
    starts = torch.tensor([0, 70], dtype=torch.int32, device=device)
    state = attend(q, RaggedKV(none, none, starts * 0), cu_seqlens_q=starts, impl="triton")
    assert torch.equal(state.out, torch.zeros_like(q))
    assert (state.lse == -torch.inf).all()


@every_device
def test_packed_keys_end_with_their_storage(device: str) -> None:
    """A last length that runs over the end is cut, as every other length is."""
    k = torch.randn(8, 1, 16, device=device, dtype=HALF)
    q = torch.randn(2, 2, 16, device=device, dtype=HALF)
    over, cut = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 12], [0, 5, 8]))
    states = [attend(q, RaggedKV(k, k, lens), impl="triton") for lens in (over, cut)]
    assert torch.equal(states[0].out, states[1].out)
    assert torch.equal(states[0].lse, states[1].lse)


@every_device
def test_storage_without_keys(device: str) -> None:
    case = Case(device=device)
    dense = DenseKV(poisoned(case, 2, 0, 2, 64), poisoned(case, 2, 0, 2, 64))
    none = integers(case, [0, 0])
    paged = PagedKV(*(poisoned(case, 1, 8, 2, 64) for _ in "kv"), none.new_empty(2, 0), none)
    for keys in (dense, paged):
        state = attend(poisoned(case, 2, 4, 64), keys, impl="triton")
        assert not state.out.any()
        assert (state.lse == -torch.inf).all()


@every_device
def test_dense_keys_without_lengths(device: str) -> None:
    case = Case(source="dense", q_lens=(2, 2), k_lens=(41, 41), dims=(16, 16), device=device)
    q, keys, options = make_inputs(case, 0)
    whole = DenseKV(keys.k[:, :41], keys.v[:, :41])
    assert_right(attend(q, whole, impl="triton", **options), q, whole, options)


@every_device
def test_states_of_cut_keys_merge(device: str) -> None:
    case = Case(source="ragged", q_lens=(5,), k_lens=(60,), padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    parts = []
    for start, stop, causal in ((0, 21, False), (21, 21, False), (21, 40, False), (40, 60, True)):
        part = RaggedKV(keys.k[start:stop], keys.v[start:stop], integers(case, [0, stop - start]))
        parts.append(attend(q, part, impl="triton", **(options | {"causal": causal})))
    assert_right(merge(*parts), q, keys, options)


@every_device
@pytest.mark.parametrize("planned", [False, True])
def test_compiled_whole(planned: bool, device: str) -> None:
    case = Case(q_lens=(1, 3), k_lens=(40, 40), dims=(16, 16), device=device)
    q, keys, options = make_inputs(case, 0)
    plan = plan_for(q, keys, options) if planned else None

    def doubled(q: torch.Tensor, keys: KeySource, options: dict[str, Any]) -> AttentionState:
        state = attend(q, keys, plan=plan, impl="triton", **options)
        return AttentionState(state.out * 2, state.lse)

    backend = "aot_eager" if device == "cpu" else "inductor"
    state = torch.compile(doubled, fullgraph=True, backend=backend)(q, keys, options)
    assert_right(AttentionState(state.out / 2, state.lse), q, keys, options)


every_producer = pytest.mark.parametrize(
    ("impl", "device"),
    [
        ("torch", "cpu"),
        pytest.param("triton", "cpu", marks=ON_CPU),
        pytest.param("triton", "cuda", marks=GPU),
    ],
)


@every_producer
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("compiled", [False, True])
def test_into_given_buffers(
    impl: str, device: str, padded: bool, layout: str, compiled: bool
) -> None:
    case = Case(q_lens=(3, 3), k_lens=(40, 20), dims=(16, 24), padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    some = {"cu_seqlens_q": None if padded else options["cu_seqlens_q"], "impl": impl}
    given = q.unflatten(0, (2, 3)) if padded else q
    nan = torch.full((*given.shape[:-1], 24), torch.nan, device=device)
    out = AttentionState(laid_out(nan, layout), laid_out(nan[..., 0], layout))

    def step(q: torch.Tensor, keys: KeySource, out: AttentionState) -> AttentionState:
        return attend(q, keys, out=out, scale=options["scale"], **some)

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    state = run(given, keys, out)
    for mine, theirs in zip(state, out, strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    rows = AttentionState(*(x.flatten(0, 1) for x in out)) if padded else out
    assert_right(rows, q, keys, options)


@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=ON_CPU)])
def test_operator_is_as_it_says(impl: str) -> None:
    case = Case(q_lens=(1, 3), k_lens=(40, 2), dims=(16, 16))
    q, keys, options = make_inputs(case, 0)
    rules = (True, None, None, 0.25, None, None)
    arguments = (q, options["cu_seqlens_q"], *flatten_source(keys), *rules, impl, None, None)
    out = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2]))
    torch.library.opcheck(torch.ops.anabranch.attend.default, (*out, *arguments))


lengths = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 1, 3, 17]), st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 64, 100])
    ),
    min_size=1,
    max_size=4,
)
masks = st.one_of(
    st.fixed_dictionaries({"causal": st.booleans(), "window": st.sampled_from([None, 1, 16, 50])}),
    st.fixed_dictionaries({"tree_width": st.sampled_from([0, 1, 3, 64])}),
)


@ON_CPU
@settings(max_examples=40)
@given(
    lengths=lengths,
    masks=masks,
    source=st.sampled_from(SOURCES),
    page_size=st.sampled_from([1, 8, 16]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 4, 5, 7]),
    dims=st.sampled_from([(8, 8), (40, 40), (24, 64), (48, 16)]),
    dtype=st.sampled_from([HALF, SINGLE]),
    softcap=st.sampled_from([None, 5.0]),
    sinks=st.booleans(),
    padding=st.integers(0, 2),
    config=st.sampled_from([None, *CONFIGS, *SELECTED]),
    batch_invariant=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fuzz(
    lengths: list[tuple[int, int]],
    masks: dict[str, Any],
    config: AttendConfig | None,
    batch_invariant: bool,
    seed: int,
    **options: Any,
) -> None:
    q_lens, k_lens = zip(*lengths, strict=True)
    case = Case(q_lens=q_lens, k_lens=k_lens, **masks, **options)
    config = None if config is None else replace(config, part_tiles=2)
    check(case, seed, config=config, batch_invariant=batch_invariant)


@GPU
@settings(max_examples=100)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 700)), min_size=1, max_size=12),
    kind=st.sampled_from(
        [
            Case(source="paged", page_size=16, group=4, dims=(128, 128), dtype=BRAIN),
            Case(source="ragged", group=5, dims=(72, 72), dtype=HALF, sinks=True, softcap=5.0),
            Case(source="dense", group=1, dims=(64, 64), dtype=SINGLE, window=33),
            Case(source="paged k|v", page_size=1, group=8, dims=(64, 64), dtype=HALF, tree_width=9),
        ]
    ),
    batch_invariant=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fuzz_lengths(
    lengths: list[tuple[int, int]], kind: Case, batch_invariant: bool, seed: int
) -> None:
    """Few kernels, which take seconds to compile, and many lengths."""
    q_lens, k_lens = zip(*lengths, strict=True)
    config = AttendConfig(32, 32, 4, 2, 1) if kind.dtype == SINGLE else SHORT
    case = replace(kind, q_lens=q_lens, k_lens=k_lens, device="cuda")
    check(case, seed, config=config, batch_invariant=batch_invariant)
