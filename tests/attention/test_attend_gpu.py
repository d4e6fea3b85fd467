"""What only a GPU can show: graphs, large memory, synchronisation, compilation, real shapes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import (
    UNUSED_PAGE,
    Case,
    assert_right,
    integers,
    make_inputs,
    starts,
    torch_attention,
)

from anabranch import AttentionState, DenseKV, PagedKV, RaggedKV, attend, make_plan
from anabranch.append import append_kv
from anabranch.kernels.config import AttendConfig
from anabranch.launches.compile_ahead import compiling_ahead

pytestmark = pytest.mark.gpu
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NUM_SEQS, Q_LEN, LENGTH, PAGE_SIZE, NUM_KV_HEADS, DIM = 8, 3, 259, 16, 8, 128
PLAIN = {
    "causal": True,
    "window": None,
    "softcap": None,
    "scale": DIM**-0.5,
    "sinks": None,
    "tree_mask": None,
}


@dataclass(frozen=True)
class Step:
    """The buffers of a step, rewritten in place between replays."""

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    keys: PagedKV
    pages: torch.Tensor  # the table without poison

    def write(self, q_lens: Sequence[int], k_lens: Sequence[int]) -> None:
        case = Case(device="cuda")
        num_tokens = sum(q_lens)
        self.q.fill_(torch.nan)
        self.q[:num_tokens] = torch.randn_like(self.q[:num_tokens])
        self.cu_seqlens_q.copy_(starts(case, q_lens))
        self.keys.seq_lens.copy_(integers(case, k_lens))
        self.keys.page_table.fill_(UNUSED_PAGE)
        for seq, length in enumerate(k_lens):
            used = -(-length // PAGE_SIZE)
            self.keys.page_table[seq, :used] = self.pages[seq, :used]

    def run(self) -> AttentionState:
        plan = make_plan(self.q, self.keys, cu_seqlens_q=self.cu_seqlens_q)
        return attend(self.q, self.keys, cu_seqlens_q=self.cu_seqlens_q, plan=plan)

    def check(self, state: AttentionState) -> None:
        """The same bits as eager, and right."""
        for mine, eager in zip(state, self.run(), strict=True):
            assert torch.equal(mine, eager)
        options = PLAIN | {"cu_seqlens_q": self.cu_seqlens_q}
        expected = torch_attention(self.q, self.keys, options, torch.float64)
        assert_right(state, self.q, self.keys, options, expected)


def make_step(num_heads: int, table_width: int) -> Step:
    case = Case(device="cuda")
    num_pages = NUM_SEQS * table_width
    k, v = torch.randn(2, num_pages, PAGE_SIZE, NUM_KV_HEADS, DIM, dtype=BRAIN, device="cuda")
    pages = torch.randperm(num_pages).int().view(NUM_SEQS, table_width).cuda()
    keys = PagedKV(k, v, torch.empty_like(pages), integers(case, [0] * NUM_SEQS))
    q = torch.empty(NUM_SEQS * Q_LEN, num_heads, DIM, dtype=BRAIN, device="cuda")
    step = Step(q, integers(case, [0] * (NUM_SEQS + 1)), keys, pages)
    step.write([Q_LEN] * NUM_SEQS, [LENGTH] * NUM_SEQS)
    return step


def capture(step: Step) -> tuple[torch.cuda.CUDAGraph, AttentionState]:
    step.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = step.run()
    return graph, state


@pytest.mark.parametrize("num_heads", [64, 32])
@pytest.mark.parametrize("table_width", [17, 256])
def test_graph_of_8_sequences_of_259_tokens_replays_at_other_lengths(
    num_heads: int, table_width: int
) -> None:
    """The bug this project started from: a length that is frozen when the graph is captured."""
    step = make_step(num_heads, table_width)
    graph, state = capture(step)
    most = table_width * PAGE_SIZE
    for q_lens, k_lens in (
        ([3] * 8, [259] * 8),
        ([3] * 8, [most] * 8),
        ([3] * 8, [3, 4, 16, 17, 31, 32, 33, 258]),
        ([3] * 8, [0, 259, 0, 1, 2, most, 0, 260]),
        ([0] * 8, [259] * 8),
        ([17, 1, 0, 1, 2, 0, 1, 2], [most, 259, 5, 0, 1, 2, most - 1, 65]),
        ([24] + [0] * 7, [most] + [0] * 7),
        ([3] * 8, [259] * 8),
    ):
        step.write(q_lens, k_lens)
        graph.replay()
        step.check(state)


def test_graph_replays_at_random_lengths() -> None:
    step = make_step(64, 256)
    graph, state = capture(step)
    numbers = random.Random(0)
    for _ in range(20):
        cuts = sorted(numbers.randint(0, NUM_SEQS * Q_LEN) for _ in range(NUM_SEQS))
        q_lens = [stop - start for start, stop in zip([0, *cuts], cuts, strict=False)]
        longest = numbers.choice([40, 300, 4096])
        step.write(q_lens, [numbers.randint(0, longest) for _ in range(NUM_SEQS)])
        graph.replay()
        step.check(state)


def test_same_bits_every_time() -> None:
    """Whoever arrives last merges the parts, in the same order."""
    step = make_step(64, 256)
    step.write([3] * 8, [4096, 1, 900, 33, 4000, 17, 2048, 2047])
    first = step.run()
    for _ in range(200):
        for again, bits in zip(step.run(), first, strict=True):
            assert torch.equal(again, bits)


def test_padded_rows_do_not_read_the_page_table() -> None:
    step = make_step(64, 17)
    step.write([1] * 8, [0] * 8)
    assert (step.keys.page_table == UNUSED_PAGE).all()
    state = step.run()
    assert not state.out.any()
    assert (state.lse == -torch.inf).all()


@pytest.fixture(scope="module")
def huge() -> torch.Tensor:
    """K and V [2, num_pages, page_size, heads, dim] of more than 2^31 elements each."""
    pages = (1 << 31) // (PAGE_SIZE * NUM_KV_HEADS * DIM) + 64
    shape = (2, pages, PAGE_SIZE, NUM_KV_HEADS, DIM)
    both = torch.full(shape, torch.nan, dtype=BRAIN, device="cuda")
    both[:, -64:] = torch.randn_like(both[:, -64:])
    return both


def test_pages_beyond_int32(huge: torch.Tensor) -> None:
    step = make_step(64, 8)
    table = torch.arange(huge.shape[1] - 64, huge.shape[1]).int().view(8, 8).cuda()
    step = replace(step, keys=replace(step.keys, k=huge[0], v=huge[1]), pages=table)
    step.write([3] * 8, [128, 1, 0, 17, 127, 33, 64, 65])
    step.check(step.run())


@pytest.mark.parametrize("q_len", [1, 70])
def test_packed_keys_beyond_int32(huge: torch.Tensor, q_len: int) -> None:
    k, v = huge.flatten(1, 2)
    num_keys, case = len(k), Case(device="cuda")
    keys = RaggedKV(k, v, integers(case, [num_keys - 700, num_keys]))
    q = torch.randn(q_len, 32, DIM, dtype=BRAIN, device="cuda")
    options = PLAIN | {"cu_seqlens_q": integers(case, [0, q_len])}
    assert_right(attend(q, keys, **options), q, keys, options)


def test_batch_beyond_int32(huge: torch.Tensor) -> None:
    """A window onto the end of a sequence that begins beyond 2^30 elements and ends beyond 2^31."""
    k, v = huge.view(2, 2, -1, NUM_KV_HEADS, DIM)
    length, case = k.shape[1], Case(device="cuda")
    q = torch.randn(2, 32, DIM, dtype=BRAIN, device="cuda")
    keys = DenseKV(k, v, integers(case, [0, length]))
    end = DenseKV(k[:, -500:], v[:, -500:], integers(case, [0, 500]))
    options = PLAIN | {"cu_seqlens_q": integers(case, [0, 1, 2])}
    assert_right(attend(q, keys, **(options | {"window": 500})), q, end, options)


def num_compiled() -> int:
    from anabranch.kernels.schedule.schedule import schedule_kernel
    from anabranch.kernels.triton.append_kv import append_kv_kernel
    from anabranch.kernels.triton.attend import attend_kernel

    kernels = (attend_kernel, schedule_kernel, append_kv_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


@pytest.mark.parametrize("source", ["paged", "ragged", "dense"])
def test_no_compilation_for_new_lengths(source: str) -> None:
    config = AttendConfig(16, 64, 4, 3, 2, keys_first=True)
    kind = Case(source=source, page_size=16, group=4, dims=(128, 128), dtype=BRAIN, device="cuda")

    def run(q_lens: Sequence[int], k_lens: Sequence[int]) -> None:
        q, keys, options = make_inputs(replace(kind, q_lens=q_lens, k_lens=k_lens), 0)
        cu_seqlens_q = options["cu_seqlens_q"]
        plan = make_plan(q, keys, cu_seqlens_q=cu_seqlens_q, config=config)
        attend(q, keys, cu_seqlens_q=cu_seqlens_q, plan=plan)
        if isinstance(keys, PagedKV):
            slots = torch.arange(len(q), device="cuda") % keys.page_size
            new = q[:, : keys.k.shape[2]]
            append_kv(keys, new, new, slots[: len(new)])

    run([2, 2], [30, 40])
    compiled = num_compiled()
    run([1], [1])
    run([1] * 16, [17] * 16)
    run([3, 0, 1], [2000, 5, 0])
    run([16] * 33, [64] * 33)
    assert num_compiled() == compiled


@pytest.mark.parametrize("planned", [True, False])
def test_no_synchronisation(planned: bool) -> None:
    step = make_step(64, 17)
    new = torch.randn(4, NUM_KV_HEADS, DIM, dtype=BRAIN, device="cuda")
    slots = torch.arange(4, device="cuda")
    options: dict[str, Any] = {"cu_seqlens_q": step.cu_seqlens_q}

    def run() -> None:
        append_kv(step.keys, new, new, slots)
        plan = make_plan(step.q, step.keys, **options) if planned else None
        attend(step.q, step.keys, plan=plan, **options)
        attend(step.q[:NUM_SEQS], step.keys)

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_layer() -> None:
    """Append, then attend to what was appended, in one compiled graph."""
    step = make_step(32, 17)
    table, lengths = step.pages.clone(), integers(Case(device="cuda"), [259] * NUM_SEQS)

    def layer(q, k, v, k_cache, v_cache, slots):
        keys = PagedKV(k_cache, v_cache, table, lengths)
        append_kv(keys, k + 1, v, slots)
        state = attend(q * 2, keys)
        return state.out * 3, state.lse

    q = torch.randn(NUM_SEQS, 32, DIM, dtype=BRAIN, device="cuda")
    k, v = torch.randn(2, NUM_SEQS, NUM_KV_HEADS, DIM, dtype=BRAIN, device="cuda")
    slots = table[:, 258 // PAGE_SIZE].long() * PAGE_SIZE + 258 % PAGE_SIZE
    caches = [(step.keys.k.clone(), step.keys.v.clone()) for _ in range(2)]
    expected = layer(q, k, v, *caches[0], slots)
    actual = torch.compile(layer, fullgraph=True)(q, k, v, *caches[1], slots)
    for mine, theirs in zip((*actual, *caches[1]), (*expected, *caches[0]), strict=True):
        assert torch.equal(mine, theirs)


DECODE_LENS = (8192, 8192, 8191, 4097, 300, 1, 0, 8192)


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lens": (1,) * 8, "k_lens": DECODE_LENS},
        {"q_lens": (4,) * 8, "k_lens": DECODE_LENS, "dtype": HALF},
        {"q_lens": (1,) * 8, "k_lens": DECODE_LENS, "page_size": 1, "dims": (256, 256)},
        {"q_lens": (2048,), "k_lens": (2048,), "source": "dense"},
        {
            "q_lens": (1000, 24, 1),
            "k_lens": (1000, 2000, 700),
            "source": "ragged",
            "dims": (64, 64),
        },
        {"q_lens": (512, 100), "k_lens": (1500, 100), "dims": (256, 256), "dtype": HALF},
        {"q_lens": (700, 300), "k_lens": (700, 300), "source": "ragged", "dims": (192, 128)},
        {"q_lens": (512, 1), "k_lens": (700, 900), "window": 128, "softcap": 30.0, "sinks": True},
    ],
    ids=str,
)
def test_real_shapes(changes: dict[str, Any]) -> None:
    kind = Case(page_size=16, num_kv_heads=8, group=4, dims=(128, 128), dtype=BRAIN, device="cuda")
    q, keys, options = make_inputs(replace(kind, **changes), 0)
    expected = torch_attention(q, keys, options, torch.float64)
    assert_right(attend(q, keys, **options), q, keys, options, expected)


@pytest.mark.parametrize("q_len", [1, 100])
def test_float32_is_no_tf32(q_len: int) -> None:
    """TF32 keeps 10 bits of a factor: with outputs near 1 it errs by about 1e-3."""
    case = Case((q_len,) * 3, (2000, 300, 100), page_size=16, dims=(128, 128), group=4)
    q, keys, options = make_inputs(replace(case, device="cuda", num_kv_heads=4), 0)
    expected = torch_attention(q, keys, options, torch.float64)
    state = attend(q, keys, **options)
    assert_right(state, q, keys, options, expected)
    tokens = slice(0, 3 * q_len)
    assert (state.out - expected.out)[tokens].abs().max() < 1e-5


def test_large_batch_of_short_sequences() -> None:
    """More sequences than the planning kernel takes at a time."""
    lengths = [seq % 40 for seq in range(1000)]
    q_lens = [seq % 3 for seq in range(1000)]
    case = Case(tuple(q_lens), tuple(lengths), page_size=16, dims=(128, 128), group=4)
    q, keys, options = make_inputs(replace(case, dtype=BRAIN, num_kv_heads=8, device="cuda"), 0)
    assert_right(attend(q, keys, **options), q, keys, options)


def test_kernels_compiled_ahead_do_not_run() -> None:
    q, keys, options = make_inputs(Case(device="cuda", dims=(24, 40)), 0)
    out = q.new_full((*q.shape[:2], 40), torch.nan)
    given = AttentionState(out, torch.full(q.shape[:2], torch.nan, device="cuda"))
    with compiling_ahead():
        attend(q, keys, out=given, **options)
    assert given.out.isnan().all()
    assert given.lse.isnan().all()
    assert_right(attend(q, keys, out=given, **options), q, keys, options)
