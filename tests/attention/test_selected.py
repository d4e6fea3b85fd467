"""Lists of keys by the property: the state over a list equals the reference over its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import GPU, Case, every_producer, integers, make_inputs, make_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_state_close

from anabranch import AttentionState, DenseKV, PagedKV, RaggedKV, SelectedKV, attend, make_plan
from anabranch.kernels.config import AttendConfig
from anabranch.keys import KeySource, flatten_source, rebuild_source

HALF, SINGLE = torch.float16, torch.float32
CUT = AttendConfig(16, 16, 4, 2, 4, fan_in=2, merge_batch=1, block_price=1)  # lists leave parts


@dataclass(frozen=True)
class Lists:
    """How lists are shared, and what they hold."""

    per_token: str = "head"  # "head", "kv head", "all"
    width: int = 40
    counts: tuple[int, ...] = (0, 1, 40, 15, 16, 17, 33)  # repeated over the lists
    weighted: bool = False
    seqs: tuple[int, ...] | None = None


def make_lists(base: KeySource, num_heads: int, num_tokens: int, lists: Lists) -> SelectedKV:
    """Random lists without repetition, poison after their counts."""
    lens, device = base.key_lens(), base.device
    shape = {"head": (num_heads,), "kv head": (base.num_kv_heads,), "all": ()}[lists.per_token]
    tokens = num_tokens // len(lens) if lists.seqs is None else 0
    owners = lists.seqs or [token // tokens for token in range(num_tokens)]
    num_lists = torch.Size(shape).numel()
    indices = torch.full((num_tokens * num_lists, lists.width), -1)
    counts = []
    for row in range(len(indices)):
        length = lens[owners[row // num_lists]]
        count = min(lists.counts[row % len(lists.counts)], length)
        indices[row, :count] = torch.randperm(length)[:count]
        counts.append(count)
    weights = torch.randn(indices.shape) if lists.weighted else None
    if weights is not None:
        weights[::2, ::3] = -torch.inf
        weights = weights.view(num_tokens, *shape, -1).to(device)
    return SelectedKV(
        base,
        indices.view(num_tokens, *shape, -1).int().to(device),
        torch.tensor(counts).view(num_tokens, *shape).int().to(device),
        weights,
        None if lists.seqs is None else torch.tensor(lists.seqs).int().to(device),
    )


def exact(
    q: torch.Tensor, selected: SelectedKV, dtype: torch.dtype, scale: float, softcap: float | None
) -> AttentionState:
    """A head and a token at a time, in plain torch."""
    q, base = q.cpu().to(dtype), selected.keys
    num_tokens, num_heads, _ = q.shape
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=dtype)
    state = AttentionState(torch.zeros(num_tokens, num_heads, base.head_dim_v, dtype=dtype), lse)
    indices, counts, weights = (
        None if x is None else x.cpu().view(num_tokens, -1, *x.shape[2 if x.dim() == dims else 1 :])
        for x, dims in ((selected.indices, 3), (selected.counts, 2), (selected.log_weights, 3))
    )
    per_seq = num_tokens // base.num_seqs
    for token in range(num_tokens):
        owner = token // per_seq if selected.seqs is None else int(selected.seqs[token])
        k, v = (x.cpu().to(dtype) for x in base.gather(owner))
        for head in range(num_heads):
            place = head * indices.shape[1] // num_heads
            count = int(counts[token, place])
            if not count:
                continue
            listed = indices[token, place, :count].long()
            kv_head = head * base.num_kv_heads // num_heads
            scores = k[listed, kv_head] @ q[token, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if weights is not None:
                scores = scores + weights[token, place, :count].to(dtype)
            state.lse[token, head] = torch.logsumexp(scores, 0)
            state.out[token, head] = torch.softmax(scores, 0).nan_to_num(0.0) @ v[listed, kv_head]
    return state


def check(
    case: Case, lists: Lists, impl: str | None, config: AttendConfig | None = None, **options: Any
) -> None:
    q, base, given = make_inputs(replace(case, padding=0), 0)
    selected = make_lists(base, q.shape[1], len(q), lists)
    plan = None if config is None else make_plan(q, selected, config=config, impl=impl)
    state = attend(q, selected, scale=given["scale"], plan=plan, impl=impl, check=True, **options)
    assert_right(state, q, selected, given["scale"], options.get("softcap"))


def assert_right(
    state: AttentionState,
    q: torch.Tensor,
    selected: SelectedKV,
    scale: float,
    softcap: float | None = None,
) -> None:
    by_torch = exact(q, selected, q.dtype, scale, softcap)
    expected = exact(q, selected, torch.float64, scale, softcap)
    # one list may be right by luck: at least a rounding of the largest value and logit
    eps = torch.finfo(q.dtype).eps
    off = [theirs + eps * right.nan_to_num(0.0, 0.0, 0.0).abs().max() for right, theirs in
           zip(expected, by_torch, strict=True)]  # fmt: skip
    assert_state_close(state, expected, AttentionState(*off))


BASE = Case(q_lens=(1, 1, 1), k_lens=(70, 33, 5), dims=(16, 16), group=2)


@every_producer
@pytest.mark.parametrize(
    ("source", "page_size", "per_token"),
    [
        ("dense", 1, "head"),
        ("dense", 1, "all"),
        ("paged", 1, "kv head"),
        ("paged", 3, "head"),
        ("paged", 16, "all"),
        ("paged", 16, "kv head"),
        ("paged by heads", 3, "head"),
        ("paged by heads", 16, "all"),
        ("paged k|v", 16, "head"),
    ],
)
def test_lists(source: str, page_size: int, per_token: str, impl: str, device: str) -> None:
    case = replace(BASE, source=source, page_size=page_size, device=device)
    check(case, Lists(per_token), impl)


@every_producer
@pytest.mark.parametrize("per_token", ["head", "kv head", "all"])
@pytest.mark.parametrize(
    "formats",
    [("fp8_tensor", "fp8_tensor"), ("fp8", "int8"), ("q8_0", "plain"), ("q8_0", "q8_0")],
    ids="/".join,
)
def test_lists_of_quantised_keys(
    formats: tuple[str, str], per_token: str, impl: str, device: str
) -> None:
    case = replace(BASE, dims=(32, 64), page_size=3, formats=formats, device=device)
    check(case, Lists(per_token), impl)


@every_producer
@pytest.mark.parametrize("per_token", ["head", "all"])
@pytest.mark.parametrize("name", ["plain", "fp8_tensor", "int8", "q8_0"])
def test_lists_of_latent_rows(name: str, per_token: str, impl: str, device: str) -> None:
    case = replace(BASE, source="latent", num_kv_heads=1, group=4, dims=(96, 64), device=device)
    check(replace(case, formats=(name, name), page_size=3), Lists(per_token), impl)


@every_producer
@pytest.mark.parametrize("per_token", ["head", "kv head", "all"])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
def test_log_weights(per_token: str, options: dict[str, Any], impl: str, device: str) -> None:
    case = replace(BASE, page_size=3, device=device)
    check(case, Lists(per_token, weighted=True), impl, **options)
    if impl == "triton":
        config = replace(CUT, keys_first=True)
        check(case, Lists(per_token, weighted=True), impl, config, **options)


@every_producer
@pytest.mark.parametrize("per_token", ["head", "all"])
def test_tokens_with_lists_of_their_own(per_token: str, impl: str, device: str) -> None:
    """Equally many a sequence, or as `seqs` says."""
    case = replace(BASE, q_lens=(2, 2, 2), page_size=3, device=device)
    check(case, Lists(per_token), impl)
    check(case, Lists(per_token, seqs=(2, 0, 0, 1, 1, 1)), impl)


@every_producer
@pytest.mark.parametrize("dims", [(40, 40), (192, 128), (24, 72)])
def test_head_dims(dims: tuple[int, int], impl: str, device: str) -> None:
    check(replace(BASE, dims=dims, dtype=HALF, group=3, device=device), Lists(), impl)


@every_producer
def test_lists_that_leave_parts(impl: str, device: str) -> None:
    config = CUT if impl == "triton" else None
    for fixed in (False, True):
        case = replace(BASE, k_lens=(70, 90, 40), device=device)
        q, base, given = make_inputs(replace(case, padding=0), 0)
        selected = make_lists(base, q.shape[1], len(q), Lists())
        plan = make_plan(q, selected, config=config, batch_invariant=fixed, impl=impl)
        state = attend(q, selected, scale=given["scale"], plan=plan)
        assert_right(state, q, selected, given["scale"])


@every_producer
@pytest.mark.parametrize("per_token", ["head", "all"])
def test_sinks(per_token: str, impl: str, device: str) -> None:
    """A list of none has its sink."""
    case = replace(BASE, page_size=3, device=device)
    q, base, given = make_inputs(replace(case, padding=0), 0)
    selected = make_lists(base, q.shape[1], len(q), Lists(per_token))
    sinks = torch.randn(q.shape[1], device=device)
    state = attend(q, selected, sinks=sinks, scale=given["scale"], impl=impl)
    with_sinks = []
    for dtype in (torch.float64, q.dtype):
        bare = exact(q, selected, dtype, given["scale"], None)
        lse = torch.logaddexp(bare.lse, sinks.to(dtype).cpu())
        with_sinks.append(AttentionState(bare.out * torch.exp(bare.lse - lse)[..., None], lse))
    assert_state_close(state, *with_sinks)


@every_producer
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_into_given_buffers(padded: bool, transposed: bool, impl: str, device: str) -> None:
    case = replace(BASE, q_lens=(2, 2, 2), page_size=3, device=device, padding=0)
    q, base, given = make_inputs(case, 0)
    selected = make_lists(base, q.shape[1], len(q), Lists())
    shape = (3, 2) if padded else (6,)
    flipped = [torch.full((4, *shape, *dim), torch.nan, device=device) for dim in ((16,), ())]
    out = AttentionState(*(x.movedim(0, len(shape)) for x in flipped))
    if not transposed:
        out = AttentionState(*(x.contiguous() for x in out))
    given_q = q.view(*shape, *q.shape[1:])
    state = attend(given_q, selected, scale=given["scale"], out=out, impl=impl)
    assert state is out
    rows = AttentionState(*(x.reshape(6, *x.shape[len(shape) :]) for x in out))
    assert_right(rows, q, selected, given["scale"])


@every_producer
def test_compiled_whole(impl: str, device: str) -> None:
    case = replace(BASE, page_size=3, device=device, padding=0)
    q, base, given = make_inputs(case, 0)
    selected = make_lists(base, 4, 3, Lists(weighted=True, seqs=(1, 0, 2)))

    def doubled(q: torch.Tensor, keys: KeySource) -> AttentionState:
        state = attend(q, keys, scale=given["scale"], impl=impl)
        return AttentionState(state.out * 2, state.lse)

    backend = "aot_eager" if device == "cpu" else "inductor"
    state = torch.compile(doubled, fullgraph=True, backend=backend)(q, selected)
    assert_right(AttentionState(state.out / 2, state.lse), q, selected, given["scale"])


def test_rebuilt_from_its_tensors() -> None:
    base = make_keys(BASE)
    latent = make_keys(replace(BASE, source="latent", num_kv_heads=1, formats=("int8", "int8")))
    sources = (base, base, base, latent)
    every = (Lists(), Lists("all", weighted=True), Lists("kv head", seqs=(0, 2, 1)), Lists("all"))
    for base, lists in zip(sources, every, strict=True):
        selected = make_lists(base, 4, 3, lists)
        again = rebuild_source(*flatten_source(selected))
        assert {name: id(x) for name, x in again.tensors().items()} == {
            name: id(x) for name, x in selected.tensors().items()
        }


@pytest.mark.parametrize("impl", ["torch", "triton"])
@settings(max_examples=12, derandomize=True)
@given(st.data())
def test_any_lists(impl: str, data: st.DataObject) -> None:
    if torch.cuda.is_available():
        pytest.skip("in the interpreter")
    lens = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    counts = data.draw(st.lists(st.integers(0, 33), min_size=1, max_size=5))
    kind = data.draw(st.sampled_from(["head", "kv head", "all"]))
    case = Case(
        q_lens=(1,) * len(lens), k_lens=tuple(lens), dims=(16, 16),
        page_size=data.draw(st.integers(1, 17)),
        source=data.draw(st.sampled_from(["dense", "paged", "paged by heads"])),
        group=data.draw(st.integers(1, 3)), num_kv_heads=data.draw(st.integers(1, 2)),
    )  # fmt: skip
    weighted = data.draw(st.booleans())
    check(case, Lists(kind, 33, tuple(counts), weighted), impl)


def refuse(message: str, q: torch.Tensor | None = None, **fields: Any) -> None:
    """Lists over two sequences of 5 and 3 keys, 2 kv heads, 4 heads, in pages of 4."""
    cache = torch.zeros(3, 4, 2, 8)
    table, lens = integers(BASE, [[0, 1], [2, 0]]), integers(BASE, [5, 3])
    given = {"keys": PagedKV(cache, cache, table, lens)}
    given["indices"] = torch.tensor([[[4, 0, 2], [1, 9, 9]], [[2, 1, 0], [0, 9, 9]]]).int()
    given["counts"] = integers(BASE, [[3, 1], [3, 1]])
    options = {name: fields.pop(name) for name in ("window", "tree_mask", "cu_seqlens_q", "sinks")
               if name in fields}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        q = torch.zeros(2, 4, 8) if q is None else q
        attend(q, SelectedKV(**(given | fields)), check=True, **options)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 1, 0), 5, "sequence 0, token 0, list 1, place 0 names key 5, the sequence has 5"),
        ((1, 0, 2), -1, "sequence 1, token 1, list 0, place 2 names key -1, the sequence has 3"),
        ((1, 0, 0), 0, "sequence 1, token 1, list 0, places 0 and 2 both name key 0"),
    ],
)
def test_bad_indices(place: tuple[int, ...], value: int, message: str) -> None:
    indices = torch.tensor([[[4, 0, 2], [1, 9, 9]], [[2, 1, 0], [0, 9, 9]]]).int()
    indices[place] = value
    refuse(message, indices=indices)


def tables_of_two() -> tuple[torch.Tensor, torch.Tensor]:
    return integers(BASE, [[0], [1]]), integers(BASE, [5, 3])


def test_bad_lists() -> None:
    ints = integers(BASE, [[3, 4], [3, 1]])
    refuse("sequence 0, token 0, list 1 has count 4, its list holds 0 to 3", counts=ints)
    refuse("sequence 0, token 0, list 0 has count -1", counts=ints - 4)
    refuse("token 1 is of sequence 2, there are 2", seqs=integers(BASE, [0, 2]))
    refuse("counts must be one of int32, got torch.int64", counts=ints.long())
    refuse(r"counts has num_lists = 1, but indices has num_lists = 2", counts=ints[:, :1])
    refuse("log_weights must be one of float32", log_weights=torch.zeros(2, 2, 3).half())
    refuse("indices have 3 lists a token, not a multiple of the 2 kv heads",
           indices=ints.new_zeros(2, 3, 3), counts=ints.new_zeros(2, 3))  # fmt: skip
    refuse("indices are of 3 tokens, not a multiple of the 2 sequences",
           indices=ints.new_zeros(3, 2, 3), counts=ints.new_zeros(3, 2))  # fmt: skip
    k = torch.zeros(8, 2, 8)
    ragged = RaggedKV(k, k, integers(BASE, [0, 4, 8]))
    refuse("keys must be DenseKV or PagedKV or LatentKV, got RaggedKV", keys=ragged)
    k, v = torch.zeros(2, 5, 2, 8), torch.zeros(2, 2, 5, 8).transpose(1, 2)
    refuse("lists need keys, values and scales that are laid out alike", keys=DenseKV(k, v))
    codes, scales = torch.zeros(2, 5, 2, 8).char(), torch.ones(2, 2, 5).transpose(1, 2)
    quantised = PagedKV(codes, codes, *tables_of_two(), scales, scales, torch.float32)
    refuse(r"\(10, 1, 5\) of v_scales", keys=quantised)


def test_bad_calls() -> None:
    refuse("lists of keys have no order for a window, got window=3", window=3)
    refuse("got a tree_mask", tree_mask=torch.ones(2, 1, dtype=torch.bool))
    refuse("got cu_seqlens_q", cu_seqlens_q=integers(BASE, [0, 1, 2]))
    refuse("q has 3 tokens, but there are lists of 2", torch.zeros(3, 4, 8))
    refuse("q has 3 heads, not a multiple of 2 lists a token", torch.zeros(2, 3, 8))
    refuse("sinks has num_heads = 3, but q has num_heads = 4", sinks=torch.zeros(3))


@GPU
def test_many_heads_share_a_list() -> None:
    """Whichever producer prefers so many rows, the one that runs them can read lists."""
    case = replace(BASE, k_lens=(700, 330, 50), dims=(128, 128), dtype=torch.bfloat16, group=32)
    case = replace(case, page_size=16, device="cuda")
    check(case, Lists("all", 300, (300, 0, 17)), None)
    with pytest.raises(ValueError, match="impl='gluon' cannot run this call"):
        check(case, Lists("all"), "gluon")


@GPU
@pytest.mark.parametrize("per_token", ["head", "all"])
def test_replayed_with_other_lists(per_token: str) -> None:
    """A graph that holds the plan is right for other indices, counts and queries."""
    case = Case(
        q_lens=(1,) * 3, k_lens=(700, 333, 50), dims=(128, 128), dtype=torch.bfloat16, group=4,
        page_size=16, device="cuda", padding=0,
    )  # fmt: skip
    q, base, given = make_inputs(case, 0)
    drawn = [
        make_lists(base, q.shape[1], 3, Lists(per_token, 300, counts))
        for counts in ((300, 17, 0), (0,), (1, 64, 65, 299))
    ]
    held = replace(drawn[0], indices=drawn[0].indices.clone(), counts=drawn[0].counts.clone())
    attend(q, held, scale=given["scale"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = attend(q, held, scale=given["scale"])
    for lists in drawn:
        held.indices.copy_(lists.indices)
        held.counts.copy_(lists.counts)
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert_right(state, q, lists, given["scale"])
