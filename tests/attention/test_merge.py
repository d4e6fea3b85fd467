"""Every implementation of the merge by the same properties."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import double, laid_out, random_state, stack, torch_merge
from tolerance import assert_state_close

from anabranch import AttentionState, merge
from anabranch.state import merge_stacked

GPU = pytest.mark.gpu
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU here")
EVERYWHERE = [
    ("torch", "cpu"),
    pytest.param("triton", "cpu", marks=ON_CPU),
    pytest.param("cuda", "cuda", marks=GPU),
]
# Triton on a GPU compiles for seconds where anything changes: its cases are test_triton_on_a_gpu.
every_implementation = pytest.mark.parametrize(
    ("impl", "device"), [*EVERYWHERE, pytest.param("torch", "cuda", marks=GPU)]
)
every_operator = pytest.mark.parametrize(("impl", "device"), EVERYWHERE)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = [(HALF, HALF), (BRAIN, BRAIN), (SINGLE, SINGLE), (SINGLE, HALF), (SINGLE, BRAIN)]
HEAD_DIMS = [1, 5, 40, 64, 72, 128, 192, 256]

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
out_layouts = st.sampled_from(["contiguous", "transposed", "stride 2", "sliced", "reversed"])
lse_layouts = st.sampled_from(["contiguous", "transposed", "stride 2", "sliced"])


def random_parts(
    num_parts: int,
    shape: Sequence[int],
    seed: int,
    dtype: torch.dtype,
    device: str,
    level: float = 0.0,
) -> list[AttentionState]:
    return [
        random_state(shape, seed + i, dtype=dtype, device=device, level=level)
        for i in range(num_parts)
    ]


def tokens_for(num_heads: int, head_dim: int) -> int:
    """Enough tokens, an odd number, for the largest error of torch to be a measure."""
    return max(7, 4097 // (num_heads * head_dim)) | 1


def assert_merged(
    actual: AttentionState, parts: Sequence[AttentionState], dtype: torch.dtype | None = None
) -> None:
    """`actual` is the merge of `parts`, as exact as torch."""
    dtype = dtype or parts[0].out.dtype
    assert actual.out.dtype == dtype
    stacked = stack(parts)
    assert_state_close(actual, torch_merge(double(stacked)), torch_merge(stacked, dtype))


@every_implementation
@given(
    seed=seeds,
    dtypes=dtypes,
    head_dim=st.sampled_from(HEAD_DIMS),
    num_parts=st.integers(1, 12),
    num_heads=st.integers(1, 6),
    out_layout=out_layouts,
    lse_layout=lse_layouts,
    level=st.sampled_from([-40.0, 0.0, 20.0]),
)
@settings(max_examples=40)
def test_separate_states(
    impl: str,
    device: str,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    head_dim: int,
    num_parts: int,
    num_heads: int,
    out_layout: str,
    lse_layout: str,
    level: float,
) -> None:
    dtype, out_dtype = dtypes
    shape = (tokens_for(num_heads, head_dim), num_heads, head_dim)
    parts = [
        AttentionState(laid_out(part.out, out_layout), laid_out(part.lse, lse_layout))
        for part in random_parts(num_parts, shape, seed, dtype, device, level)
    ]
    merged = merge(*parts, out_dtype=out_dtype, impl=impl)
    assert_merged(merged, parts, out_dtype)
    only_out = merge(*parts, out_dtype=out_dtype, with_lse=False, impl=impl)
    assert torch.equal(only_out, merged.out)


@every_implementation
@given(
    seed=seeds,
    dtypes=dtypes,
    head_dim=st.sampled_from(HEAD_DIMS),
    num_parts=st.sampled_from([1, 2, 3, 17]),
    dim=st.integers(0, 2),
    out_layout=out_layouts,
    lse_layout=lse_layouts,
)
@settings(max_examples=30)
def test_stacked_states(
    impl: str,
    device: str,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    head_dim: int,
    num_parts: int,
    dim: int,
    out_layout: str,
    lse_layout: str,
) -> None:
    dtype, out_dtype = dtypes
    parts = random_parts(num_parts, (tokens_for(4, head_dim), 4, head_dim), seed, dtype, device)
    out, lse = (torch.stack(fields, dim) for fields in zip(*parts, strict=True))
    stacked = AttentionState(laid_out(out, out_layout), laid_out(lse, lse_layout))
    merged = merge(stacked, dim=dim, out_dtype=out_dtype, impl=impl)
    assert_merged(merged, parts, out_dtype)


@every_implementation
@pytest.mark.parametrize("dim", [0, 1])
def test_256_parts(impl: str, device: str, dim: int) -> None:
    parts = random_parts(256, (5, 3, 64), 0, SINGLE, device)
    stacked = AttentionState(*(torch.stack(fields, dim) for fields in zip(*parts, strict=True)))
    assert_merged(merge(stacked, dim=dim, out_dtype=BRAIN, impl=impl), parts, BRAIN)


@every_implementation
@given(
    seed=seeds,
    dtypes=dtypes,
    num_parts=st.sampled_from([1, 2, 9]),
    out_layout=out_layouts,
    lse_layout=lse_layouts,
    with_lse=st.booleans(),
)
@settings(max_examples=20)
def test_into_given_buffers(
    impl: str,
    device: str,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    num_parts: int,
    out_layout: str,
    lse_layout: str,
    with_lse: bool,
) -> None:
    """Any strides; what is not asked for is not written."""
    dtype, out_dtype = dtypes
    parts = random_parts(num_parts, (21, 5, 40), seed, dtype, device)
    out = laid_out(torch.full_like(parts[0].out, torch.nan, dtype=out_dtype), out_layout)
    lse = laid_out(torch.full_like(parts[0].lse, 7.0), lse_layout)
    if with_lse:
        merged = merge(*parts, out=AttentionState(out, lse), impl=impl)
        assert merged.out is out
        assert merged.lse is lse
    else:
        only_out = merge(*parts, out=AttentionState(out, lse), with_lse=False, impl=impl)
        assert only_out is out
        assert (lse == 7.0).all()
        merged = AttentionState(out, merge(*parts, impl=impl).lse)
    assert_merged(merged, parts, out_dtype)


@every_implementation
@given(
    seed=seeds,
    dtype=st.sampled_from([HALF, BRAIN, SINGLE]),
    num_parts=st.sampled_from([1, 2, 3, 9]),
    stacked=st.booleans(),
    out_layout=out_layouts,
    lse_layout=lse_layouts,
)
@settings(max_examples=20)
def test_in_place_into_the_first(
    impl: str,
    device: str,
    seed: int,
    dtype: torch.dtype,
    num_parts: int,
    stacked: bool,
    out_layout: str,
    lse_layout: str,
) -> None:
    before = random_parts(num_parts, (13, 4, 72), seed, dtype, device)
    if stacked:
        every = stack(before)
        every = AttentionState(laid_out(every.out, out_layout), laid_out(every.lse, lse_layout))
        parts = [AttentionState(*part) for part in zip(*every, strict=True)]
        merge(every, dim=0, out=parts[0], impl=impl)
    else:
        parts = [
            AttentionState(laid_out(part.out, out_layout), laid_out(part.lse, lse_layout))
            for part in before
        ]
        merge(*parts, out=parts[0], impl=impl)
    assert_merged(parts[0], before)
    for part, original in zip(parts[1:], before[1:], strict=True):
        assert torch.equal(part.out, original.out)
        assert torch.equal(part.lse, original.lse)


@every_implementation
@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_any_rank(impl: str, device: str, rank: int, layout: str) -> None:
    """Leading dimensions of any number, also where no view can flatten them."""
    if rank < 2 and layout == "transposed":
        pytest.skip("one dimension cannot be transposed")
    shape = (*(3, 2, 4, 2, 3)[:rank], 24)
    parts = [
        AttentionState(laid_out(part.out, layout), laid_out(part.lse, layout) if rank else part.lse)
        for part in random_parts(2, shape, 0, HALF, device)
    ]
    assert_merged(merge(*parts, impl=impl), parts)
    given = AttentionState(*(laid_out(torch.full_like(x, torch.nan), layout) for x in parts[0]))
    if rank:
        merge(*parts, out=given, impl=impl)
        assert_merged(given, parts)
    assert_merged(merge(stack(parts), dim=0, impl=impl), parts)


@every_implementation
@pytest.mark.parametrize("shape", [(0, 3, 8), (4, 0, 8), (0, 8), (4, 3, 0)], ids=str)
def test_no_rows_and_no_columns(impl: str, device: str, shape: tuple[int, ...]) -> None:
    parts = random_parts(3, shape, 0, HALF, device)
    for merged in (merge(*parts, impl=impl), merge(stack(parts), dim=0, impl=impl)):
        assert merged.out.shape == shape
        assert merged.lse.shape == shape[:-1]
        torch.testing.assert_close(merged.lse, torch_merge(stack(parts)).lse)


@every_implementation
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_empty_rows(impl: str, device: str, dtype: torch.dtype) -> None:
    """One side empty is the other side; both empty is empty, not NaN."""
    a, b = random_parts(2, (100, 13, 8), 0, dtype, device)
    one, both = a.lse.isneginf() ^ b.lse.isneginf(), a.lse.isneginf() & b.lse.isneginf()
    assert one.any()
    assert both.any()
    merged = merge(a, b, impl=impl)
    assert_merged(merged, [a, b])
    kept = torch.where(a.lse.isneginf()[..., None], b.out, a.out)
    assert torch.equal(merged.out[one], kept[one])
    assert torch.equal(merged.lse[one], torch.maximum(a.lse, b.lse)[one])
    assert not merged.out[both].count_nonzero()
    assert merged.lse[both].isneginf().all()


@every_implementation
def test_values_that_no_state_has(impl: str, device: str) -> None:
    """NaN and +inf reach the result, in the same places as in the definition."""
    lses = torch.tensor([-torch.inf, torch.inf, torch.nan, -200.0, 0.0, 3.0])
    pairs = torch.cartesian_prod(lses, lses).T[..., None].contiguous().to(device)
    outs = torch.randn(*pairs.shape, 16, device=device)
    parts = [AttentionState(out, lse) for out, lse in zip(outs, pairs, strict=True)]
    merged, expected = merge(*parts, impl=impl), merge_stacked(stack(parts))
    for actual, wanted in zip(merged, expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
    assert merged.out.isnan().any()
    assert not merged.out.isnan().all()


@GPU
@pytest.mark.parametrize(
    ("num_parts", "head_dim", "dtypes", "layout", "stacked"),
    [
        (2, 128, (HALF, HALF), "contiguous", False),
        (2, 40, (SINGLE, SINGLE), "sliced", False),
        (3, 192, (BRAIN, BRAIN), "transposed", False),
        (17, 128, (SINGLE, BRAIN), "contiguous", True),
    ],
)
def test_triton_on_a_gpu(
    num_parts: int,
    head_dim: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    layout: str,
    stacked: bool,
) -> None:
    parts = [
        AttentionState(*(laid_out(x, layout) for x in part))
        for part in random_parts(num_parts, (37, 6, head_dim), 0, dtypes[0], "cuda")
    ]
    states, dim = ([stack(parts)], 0) if stacked else (parts, None)
    merged = merge(*states, dim=dim, out_dtype=dtypes[1], impl="triton")
    assert_merged(merged, parts, dtypes[1])
    if dtypes[0] is dtypes[1]:
        before = [AttentionState(*(x.clone() for x in part)) for part in parts]
        assert_merged(merge(*parts, out=parts[0], impl="triton"), before)


@GPU
@pytest.mark.parametrize(
    ("impl", "dtypes"),
    [("triton", (HALF, HALF)), ("cuda", (HALF, HALF)), ("cuda", (SINGLE, BRAIN))],
    ids=str,
)
def test_sizes_of_real_models(impl: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    parts = random_parts(2, (613, 48, 128), 0, dtypes[0], "cuda")
    assert_merged(merge(*parts, out_dtype=dtypes[1], impl=impl), parts, dtypes[1])


@GPU
@pytest.mark.parametrize("impl", ["torch", "triton", "cuda"])
def test_cuda_graph_merges_what_is_there_at_replay(impl: str) -> None:
    parts = random_parts(3, (64, 8, 128), 0, HALF, "cuda")
    result = AttentionState.empty((64, 8, 128), dtype=HALF, device="cuda")
    merge(*parts, out=result, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge(*parts, out=result, impl=impl)
    fresh = random_parts(3, (64, 8, 128), 99, HALF, "cuda")
    for part, values in zip(parts, fresh, strict=True):
        part.out.copy_(values.out)
        part.lse.copy_(values.lse)
    graph.replay()
    assert_merged(result, fresh)


@every_operator
@pytest.mark.parametrize("stacked", [False, True])
def test_compiles_into_one_graph(impl: str, device: str, stacked: bool) -> None:
    parts = random_parts(2, (6, 4, 16), 0, HALF, device)
    stacked_parts = stack(parts)

    def step(gain: float) -> tuple[torch.Tensor, ...]:
        a = parts[0]._replace(out=parts[0].out * gain)
        state = merge(stacked_parts, dim=0, impl=impl) if stacked else merge(a, parts[1], impl=impl)
        wide = merge(*parts, out_dtype=SINGLE, with_lse=False, impl=impl)
        return state.out + 1, state.lse, wide

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(compiled(1.0), step(1.0), strict=True):
        assert torch.equal(mine, theirs)


@every_operator
def test_compiles_with_the_identity_made_inside(
    impl: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracer never reads whether a call may be a repeated one, which it need not understand."""
    module = sys.modules["anabranch.merge"]
    chooses = module._are_on_gpu

    def untraceable(states: tuple[AttentionState, ...]) -> bool:
        torch._dynamo.graph_break()
        return chooses(states)

    monkeypatch.setattr(module, "_are_on_gpu", untraceable)

    def layer(a: AttentionState, b: AttentionState) -> AttentionState:
        empty = AttentionState.empty(a.out.shape, dtype=a.out.dtype, device=a.out.device)
        return merge(empty, a, b, impl=impl)

    parts = random_parts(2, (6, 4, 16), 0, HALF, device)
    torch._dynamo.reset()
    assert_merged(torch.compile(layer, fullgraph=True, backend="aot_eager")(*parts), parts)


@every_operator
def test_compiles_once_for_all_lengths(impl: str, device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b: merge(a, b, impl=impl), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    compiled(*random_parts(2, (3, 4, 16), 0, HALF, device))
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (5, 8):
            parts = random_parts(2, (num_tokens, 4, 16), 0, HALF, device)
            assert_merged(compiled(*parts), parts)


@every_operator
def test_compiles_into_given_buffers(impl: str, device: str) -> None:
    parts = random_parts(2, (6, 4, 16), 0, HALF, device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda a, b, out: merge(a, b, out=out, impl=impl), fullgraph=True, backend="aot_eager"
    )
    result = AttentionState.empty((6, 4, 16), dtype=HALF, device=device)
    compiled(*parts, result)
    assert_merged(result, parts)
    first = AttentionState(*(x.clone() for x in parts[0]))
    compiled(first, parts[1], first)
    assert_merged(first, parts)


@every_operator
@pytest.mark.parametrize("stacked", [False, True])
def test_operator_is_well_formed(impl: str, device: str, stacked: bool) -> None:
    parts = random_parts(3, (5, 2, 8), 0, SINGLE, device)
    outs, lses = map(list, zip(*([stack(parts)] if stacked else parts), strict=True))
    torch.library.opcheck(torch.ops.anabranch.merge, (outs, lses, stacked, HALF, impl))
