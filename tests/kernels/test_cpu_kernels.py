"""The C kernels of the CPU against torch and the reference, and what happens without a compiler."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, assert_right, make_inputs
from tiny_models import source
from tolerance import assert_close
from torch.nn import functional

from anabranch import (
    LLM,
    DenseKV,
    PagedKV,
    RaggedKV,
    SamplingParams,
    append_kv,
    attend,
)
from anabranch.kernels.cpu import native as native_module
from anabranch.kernels.cpu import pages, waiting
from anabranch.kernels.cpu.linear import (
    F32,
    WeightPart,
    describe,
    find_largest,
    pack,
    packed_linear,
    rms_norm,
    silu_gate,
)
from anabranch.kernels.cpu.native import native
from anabranch.keys import KeySource
from anabranch.llm.engine import limits
from anabranch.llm.runner.kv_cache import LayerShape, allocate_layers
from anabranch.llm.sampling.logits import drop_nan, row_peaks

needs_compiler = pytest.mark.skipif(native() is None, reason="needs a C compiler")
int32 = torch.int32
UNUSED: Any = {"softcap": None, "sinks": None, "tree_mask": None}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=int32)


@needs_compiler
@pytest.mark.parametrize("size", [1, 15, 16, 37, 200])
def test_rows(size: int) -> None:
    x = torch.randn(3, 2 * size) * 20
    gate, up = x.double().chunk(2, -1)
    by_torch = functional.silu(x[:, :size]) * x[:, size:]
    assert_close(silu_gate(x), functional.silu(gate) * up, by_torch)
    weight = torch.randn(2 * size)
    exact = functional.rms_norm(x.double(), (2 * size,), weight.double(), 1e-5)
    by_torch = functional.rms_norm(x, (2 * size,), weight, 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), exact, by_torch)


def paged(seq_lens: list[int], page_size: int, num_kv_heads: int, dims: tuple[int, int]) -> PagedKV:
    """Pages in random order; what no sequence reads is NaN."""
    counts = [-(-length // page_size) for length in seq_lens]
    width = max(*counts, 1) + 1
    table = torch.full((len(seq_lens), width), -1, dtype=int32)
    order = torch.randperm(sum(counts) + 2)
    k, v = (torch.full((len(order), page_size, num_kv_heads, dim), torch.nan) for dim in dims)
    taken = 0
    for seq, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        own = order[taken : taken + count]
        table[seq, :count] = own
        taken += count
        for cache in (k, v):
            rows = cache[own].flatten(0, 1)
            rows[:length] = torch.randn_like(rows[:length])
            cache[own] = rows.unflatten(0, (count, page_size))
    return PagedKV(k, v, table, torch.tensor(seq_lens, dtype=int32))


CASES = [
    # lengths, queries, page size, heads, kv heads, head dims, window
    ([1], [1], 16, 9, 3, (64, 64), None),
    ([70, 0, 63, 64, 65], [1, 0, 1, 1, 1], 16, 9, 3, (64, 64), None),
    ([5, 200, 40], [5, 3, 8], 7, 4, 2, (32, 16), None),
    ([5, 200, 40], [5, 3, 8], 7, 4, 2, (32, 48), 33),
    ([1500], [2], 16, 4, 1, (16, 16), None),
    ([1500], [1], 32, 2, 2, (256, 256), 700),
    ([3], [5], 4, 2, 1, (16, 16), None),
    # many queries, which see keys by blocks of 48
    ([47, 48, 49, 95], [9, 48, 49, 12], 5, 4, 2, (32, 48), None),
    ([96, 97, 144, 145], [96, 30, 17, 100], 16, 3, 1, (64, 16), 47),
    ([97, 8, 200], [65, 11, 130], 48, 7, 1, (256, 256), 48),
    ([300], [40], 7, 2, 2, (208, 32), 49),
]


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_queries_over_pages(case: Any, causal: bool) -> None:
    seq_lens, q_lens, page_size, num_heads, num_kv_heads, dims, window = case
    keys = paged(seq_lens, page_size, num_kv_heads, dims)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + 1, 2 * num_heads, dims[0])[:, :num_heads]
    assert pages.reads_pages(q, keys, starts, softcap=None, tree_mask=None)
    options: Any = {"causal": causal, "window": window, "scale": 0.2}
    state = pages.attend_pages(q, keys, starts, **options)
    assert_right(state, q, keys, {**UNUSED, **options, "cu_seqlens_q": starts})


@needs_compiler
@pytest.mark.parametrize("window", [None, 5, 50, 100])
@pytest.mark.parametrize(
    ("group", "dims"), [(1, (64, 64)), (3, (16, 64)), (7, (128, 64)), (8, (256, 256))]
)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(
    group: int, dims: tuple[int, int], window: int | None
) -> None:
    """In pieces of many queries, beside other sequences, and in pages of any size."""
    length, heads, (dim_k, dim_v) = 200, 2, dims
    q = torch.randn(length, heads * group, dim_k)
    k, v = torch.randn(1, length, heads, dim_k), torch.randn(1, length, heads, dim_v)
    options: Any = {"causal": True, "window": window, "scale": 0.2}
    ends = torch.tensor([0, length], dtype=int32)
    whole = pages.attend_pages(q, DenseKV(k, v), ends, **options)
    start = 0
    for count, page_size in ((9, 1), (33, 16), (64, 48), (10, 50), (65, 3), (19, 7)):
        stop = start + count
        keys = paged([50, stop, 30], page_size, heads, dims)
        positions = torch.arange(stop)
        rows = keys.page_table[1, positions // page_size].long(), positions % page_size
        keys.k[rows], keys.v[rows] = k[0, :stop], v[0, :stop]
        other = torch.randn(21, heads * group, dim_k)
        starts = torch.tensor([0, 1, 1 + count, 21 + count], dtype=int32)
        packed = torch.cat([other[:1], q[start:stop], other[1:]])
        state = pages.attend_pages(packed, keys, starts, **options)
        assert torch.equal(state.out[1 : 1 + count], whole.out[start:stop])
        assert torch.equal(state.lse[1 : 1 + count], whole.lse[start:stop])
        start = stop
    assert start == length


@needs_compiler
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_tokens", [8, 40])
def test_keys_before_every_window_are_not_read(num_tokens: int, value: float) -> None:
    q, k, v = torch.randn(num_tokens, 2, 64), torch.randn(100, 1, 64), torch.randn(100, 1, 64)
    keys, starts = RaggedKV(k, v, ints(0, 100)), ints(0, num_tokens)
    options: Any = {"causal": True, "window": 8, "scale": 0.2}
    expected = pages.attend_pages(q, keys, starts, **options)
    v[: 100 - num_tokens - 7] = value
    state = pages.attend_pages(q, keys, starts, **options)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    v[100 - num_tokens - 7] = value
    assert not pages.attend_pages(q, keys, starts, **options).out[0].isfinite().any()


def sources() -> list[KeySource]:
    """Two sequences of 50 keys each."""
    k, v = torch.randn(2, 50, 2, 64), torch.randn(2, 50, 2, 64)
    ragged = RaggedKV(k.flatten(0, 1), v.flatten(0, 1), ints(0, 50, 100))
    return [DenseKV(k, v), ragged, paged([50, 50], 16, 2, (64, 64))]


@needs_compiler
@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 10, 40), "at most num_tokens = 20, got 0 to 40"),
        ((0, 10, 21), "at most num_tokens = 20, got 0 to 21"),
        ((0, 1, 21), "at most num_tokens = 20, got 0 to 21"),
        ((-12, 10, 20), "from 0 .*, got -12 to 20"),
        ((-1, 1, 2), "from 0 .*, got -1 to 2"),
        ((0, 12, 4), "not descend, got 12 then 4 at sequence 1"),
    ],
)
def test_starts_outside_the_queries_are_refused(starts: tuple[int, ...], message: str) -> None:
    q = torch.randn(20, 4, 64)
    for keys in sources():
        with pytest.raises(IndexError, match=f"cu_seqlens_q .*{message}"):
            attend(q, keys, cu_seqlens_q=ints(*starts))


@needs_compiler
def test_contiguous_keys_outside_their_storage_are_refused() -> None:
    q, k, v = torch.randn(2, 4, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 5, 2, 64)
    with pytest.raises(IndexError, match="sequence 1 has seq_len 9, its storage holds 0 to 5"):
        attend(q, DenseKV(k, v, ints(5, 9)))
    rows = k[0], v[0]
    for bounds in ((0, 3, 9), (-3, 1, 5)):
        message = f"at most num_keys = 5, got {bounds[0]} to {bounds[2]}"
        with pytest.raises(IndexError, match=message):
            attend(q, RaggedKV(*rows, ints(*bounds)))


@needs_compiler
@pytest.mark.parametrize("length", [5, 1500], ids=["whole", "in parts"])
def test_a_key_of_nan_is_no_empty_state(length: int) -> None:
    keys, starts = paged([length, length], 16, 1, (16, 16)), torch.tensor([0, 1, 2], dtype=int32)
    page, row = divmod(length - 2, 16)
    keys.k[keys.page_table[0, page], row] = torch.nan
    options: Any = {"causal": True, "window": None, "scale": 0.2}
    q = torch.randn(2, 2, 16)
    state = pages.attend_pages(q, keys, starts, **options)
    assert state.out[0].isnan().all() and state.lse[0].isnan().all()
    alone = PagedKV(keys.k, keys.v, keys.page_table[1:], keys.seq_lens[1:])
    expected = pages.attend_pages(q[1:], alone, starts[:2], **options)
    torch.testing.assert_close((state.out[1:], state.lse[1:]), tuple(expected))


@needs_compiler
def test_kernels_may_be_called_by_many_threads() -> None:
    """Each call has its own memory, and each calling thread its own team."""
    x, weight = torch.randn(5, 96), torch.randn(70, 96)
    part = WeightPart(F32, 70, pack(weight))
    packed, norm = describe([part], 96, float_inputs=True), torch.randn(96)
    keys, starts = paged([70, 40], 16, 2, (32, 32)), torch.tensor([0, 1, 2], dtype=int32)
    q = torch.randn(2, 4, 32)
    tables = [torch.randint(0, len(keys.k), (2, 6), dtype=int32) for _ in range(4)]

    def once(number: int) -> list[torch.Tensor]:
        mine = PagedKV(keys.k, keys.v, tables[number], keys.seq_lens)
        state = pages.attend_pages(q, mine, starts, causal=True, window=None, scale=0.2)
        products = packed_linear(x + number, packed, 70, None)
        return [*state, products, rms_norm(x + number, norm, 1e-5), silu_gate(x * number)]

    def often(number: int) -> None:
        barrier.wait()
        for _ in range(50):
            found = once(number)
            pairs = zip(found, expected[number], strict=True)
            if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
                wrong.append(number)

    expected = [once(number) for number in range(4)]
    wrong, barrier = list[int](), threading.Barrier(4)
    threads = [threading.Thread(target=often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_compiler
@pytest.mark.parametrize("formats", [("fp8_tensor", "plain"), ("fp8", "int8"), ("q8_0", "q8_0")])
def test_decode_of_quantised_keys(formats: tuple[str, str]) -> None:
    """In halves, small scales are subnormal."""
    lengths = {"q_lens": (1, 8, 0, 3), "k_lens": (700, 33, 5, 64)}
    case = Case(**lengths, dims=(64, 32), page_size=7, formats=formats)
    q, keys, options = make_inputs(case, 0)
    if formats == ("q8_0", "q8_0"):
        keys.v_scales.mul_(1e-4)
    starts = options["cu_seqlens_q"]
    assert pages.reads_pages(q, keys, starts, softcap=None, tree_mask=None)
    state = pages.attend_pages(q, keys, starts, causal=True, window=None, scale=options["scale"])
    assert_right(state, q, keys, options)


@needs_compiler
def test_decode_quantises_new_keys() -> None:
    case = Case(q_lens=(1, 1), k_lens=(20, 5), dims=(32, 64), padding=0, formats=("q8_0", "fp8"))
    q, keys, options = make_inputs(case, 0)
    _, twin, _ = make_inputs(case, 0)
    new = torch.randn(2, 2, 32), torch.randn(2, 2, 64)
    new[0][1, 0, 3] = torch.nan
    slots = keys.page_table[[0, 1], [2, 0]].long() * 8 + torch.tensor([3, 4])
    counts = torch.zeros(2, 1, dtype=int32)
    append_kv(twin, *new, slots, saturated=counts[0])
    rules: Any = {"causal": True, "window": None, "scale": options["scale"]}
    starts = options["cu_seqlens_q"]
    expected = pages.attend_pages(q, twin, starts, **rules)
    fused = pages.NewKeys(*new, slots, counts[1])
    state = pages.attend_pages(q, keys, starts, new=fused, **rules)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    assert counts.tolist() == [[1], [1]] and state.out.isfinite().all()


@needs_compiler
def test_decode_keeps_new_keys_first() -> None:
    keys = paged([20, 5], 4, 2, (16, 32))
    starts = torch.tensor([0, 1, 2], dtype=int32)
    q, k, v = torch.randn(2, 6, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 32)
    slots = [int(keys.page_table[0, 4]) * 4 + 3, int(keys.page_table[1, 1]) * 4]
    options: Any = {"causal": True, "window": None, "scale": 0.25}
    twin = PagedKV(keys.k.clone(), keys.v.clone(), keys.page_table, keys.seq_lens)
    for slot, new_k, new_v in zip(slots, k, v, strict=True):
        twin.k[slot // 4, slot % 4], twin.v[slot // 4, slot % 4] = new_k, new_v
    new = pages.NewKeys(k, v, torch.tensor(slots))
    state = pages.attend_pages(q, keys, starts, new=new, **options)
    torch.testing.assert_close(keys.k, twin.k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(keys.v, twin.v, rtol=0, atol=0, equal_nan=True)
    expected = pages.attend_pages(q, twin, starts, **options)
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    skipped = pages.NewKeys(k + 1, v, torch.tensor([-1, -1]))
    pages.attend_pages(q, keys, starts, new=skipped, **options)
    torch.testing.assert_close(keys.k, twin.k, rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_decode_refuses_what_lies_outside_the_cache() -> None:
    keys = paged([20], 4, 1, (16, 16))
    starts, q = torch.tensor([0, 1], dtype=int32), torch.randn(1, 1, 16)
    options: Any = {"causal": True, "window": None, "scale": 1.0}
    row = torch.randn(1, 1, 16)
    new = pages.NewKeys(row, row, torch.tensor([4 * len(keys.k)]))
    with pytest.raises(IndexError, match="token 0 has a slot outside"):
        pages.attend_pages(q, keys, starts, new=new, **options)
    keys.page_table[0, 2] = len(keys.k)
    with pytest.raises(IndexError, match=f"sequence 0 has page {len(keys.k)}, but there are"):
        pages.attend_pages(q, keys, starts, **options)
    keys.seq_lens[0] = 1000
    with pytest.raises(IndexError, match="sequence 0 has seq_len 1000, its storage holds 0 to 24"):
        pages.attend_pages(q, keys, starts, **options)


@needs_compiler
@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 70000])
def test_largest_of_rows(size: int) -> None:
    """The first of several, none in a row of NaN or -inf, and NaN counts as the least."""
    x = torch.randint(-20, 20, (9, size)).float()
    x[1:4, size // 2] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x[4], x[5] = torch.nan, -torch.inf
    x[6, 0], x[7, -1] = torch.nan, 50
    scores = drop_nan(x)
    best = scores.argmax(1)
    places, peaks = find_largest(x)
    assert torch.equal(places, best)
    torch.testing.assert_close(peaks, row_peaks(x, scores, best), equal_nan=True, rtol=0, atol=0)
    assert len(find_largest(x[:0])[0]) == 0


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_runs(compiler: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("CC", compiler)
    assert native_module.native.__wrapped__() is None
    assert "torch" in caplog.text


class Cores:
    """Preemptions and a clock by the test's word."""

    def __init__(self, monkeypatch: Any) -> None:
        self.count, self.now = 0, 0.0
        monkeypatch.setattr(waiting, "preemptions", lambda: self.count)
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now)

    def after(self, seconds: float, preemptions: int) -> None:
        self.now += seconds
        self.count += preemptions


def idle_teams() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "idle team"}


@needs_compiler
def test_threads_sleep_while_cores_are_shared(monkeypatch: Any) -> None:
    before = idle_teams()  # of engines that other tests left
    cores = Cores(monkeypatch)
    sharing = waiting.CoreSharing()
    cores.after(waiting.PERIOD / 2, 1000)
    sharing.observe()
    assert not sharing.is_shared, "too early to know"
    cores.after(waiting.PERIOD, 1000)
    sharing.observe()
    (team,) = idle_teams() - before
    assert sharing.is_shared
    cores.after(1.0, (waiting.BUSY + waiting.FREE) // 2)
    sharing.observe()
    assert sharing.is_shared, "neither busy nor free changes nothing"
    assert idle_teams() - before == {team}
    cores.after(1.0, 0)
    sharing.observe()
    assert not sharing.is_shared
    team.join(30)
    assert not idle_teams() - before


def test_the_engine_watches_its_cores_and_sizes_itself_by_few_tokens(monkeypatch: Any) -> None:
    sized: list[int] = []
    find = limits.find_layers

    def find_layers(model: Any, num_tokens: int, vocab_size: int) -> Any:
        sized.append(num_tokens)
        return find(model, num_tokens, vocab_size)

    looks: list[int] = []
    monkeypatch.setattr(limits, "find_layers", find_layers)
    monkeypatch.setattr(waiting.CoreSharing, "observe", lambda _: looks.append(1))
    llm = LLM(source(), device="cpu", cuda_graphs=False)
    llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert sized == [limits.PROFILED_CPU_TOKENS]
    assert len(looks) >= 6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_cache_takes_memory_when_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    (cache,) = allocate_layers(
        [LayerShape(4, 64, 64, torch.float32)], 1 << 13, 16, torch.device("cpu")
    )
    assert cache.k.nbytes + cache.v.nbytes == 256 << 20
    assert resident() - before < 64 << 20
    assert not cache.k[-1].any() and not cache.v[0].any()
    cache.k[5] = 1.0
    assert int(cache.k.count_nonzero()) == 16 * 4 * 64
