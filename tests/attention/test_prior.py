"""States that a call goes on from: merged with its own, they equal the reference over all keys."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import GPU, UNUSED_PAGE, Case, assert_right, every_producer, make_inputs

from anabranch import AttentionState, PagedKV, attend, make_plan, merge, reference
from anabranch.kernels.config import AttendConfig

CUT = AttendConfig(16, 16, 4, 2, 4, fan_in=2, merge_batch=1, block_price=1)  # blocks leave parts
# The fourth sequence has no keys, the third and the fifth none beside those of the prior states.
BASE = Case(
    q_lens=(1, 3, 1, 0, 1, 1), k_lens=(50, 33, 2, 0, 5, 70), page_size=1, dims=(16, 24), group=2
)


def span(keys: PagedKV, starts: list[int], stops: list[int]) -> PagedKV:
    """Some keys of each sequence, from the beginning of a page on."""
    size, lens = keys.page_size, [b - a for a, b in zip(starts, stops, strict=True)]
    table = torch.full((len(lens), max(lens) // size + 1), UNUSED_PAGE, dtype=torch.int32)
    for seq, (start, length) in enumerate(zip(starts, lens, strict=True)):
        pages = -(-length // size)
        table[seq, :pages] = keys.page_table[seq, start // size :][:pages]
    lengths = torch.tensor(lens, dtype=torch.int32).to(keys.device)
    return replace(keys, page_table=table.to(keys.device), seq_lens=lengths)


def make_prior(
    case: Case, cuts: tuple[int, ...]
) -> tuple[torch.Tensor, PagedKV, PagedKV, AttentionState, dict[str, Any]]:
    """Queries, all keys, those after the cuts, a stack of states over those before, options."""
    q, keys, options = make_inputs(case, 0)
    assert isinstance(keys, PagedKV)
    size = case.page_size
    # What all tokens of a sequence see, in whole pages; one token sees its own key too
    seen = (k - (q if q > 1 else 0) for k, q in zip(case.k_lens, case.q_lens, strict=True))
    before = [count // size * size for count in seen]
    bounds = [[min(cut, most) for most in before] for cut in (0, *cuts)]
    given = {"causal": False, "scale": options["scale"], "softcap": options["softcap"]}
    given["cu_seqlens_q"] = options["cu_seqlens_q"]
    states = [reference.attend(q, span(keys, *each), **given) for each in pairwise(bounds)]
    out, lse = (torch.stack(x) for x in zip(*states, strict=True))
    prior = AttentionState(out.to(case.device, q.dtype), lse.to(case.device, torch.float32))
    return q, keys, span(keys, bounds[-1], list(case.k_lens)), prior, options


PLANS: dict[str, dict[str, Any] | None] = {
    "": None,
    "fixed parts, keys first": {
        "config": replace(CUT, keys_first=True, part_tiles=1),
        "batch_invariant": True,
    },
    "a merge apart": {"config": CUT, "fused_merge": False},
    "leaving empty rows": {"leave_empty": True},
}


@every_producer
@pytest.mark.parametrize(
    ("cuts", "plan"), [((20,), ""), *(((3, 20, 21), name) for name in PLANS)], ids=str
)
def test_equals_all_keys(cuts: tuple[int, ...], plan: str, impl: str, device: str) -> None:
    if impl == "torch" and "config" in (PLANS[plan] or {}):
        pytest.skip("tiles are Triton's")
    case = replace(BASE, device=device)
    q, keys, rest, prior, options = make_prior(case, cuts)
    if len(cuts) == 1:
        prior = AttentionState(*(x[0] for x in prior))
    made = PLANS[plan]
    if made is not None:
        made = make_plan(q, rest, cu_seqlens_q=options["cu_seqlens_q"], impl=impl, **made)
    state = attend(q, rest, **options, prior=prior, plan=made, impl=impl)
    assert_right(state, q, keys, options)


@every_producer
def test_options_and_strides(impl: str, device: str) -> None:
    """Sinks count once, with or without keys; the stack and the result have any strides."""
    case = replace(BASE, device=device, softcap=5.0, sinks=True)
    q, keys, rest, prior, options = make_prior(case, (3, 20))
    moved = AttentionState(*(x.movedim(0, 1).contiguous().movedim(1, 0) for x in prior))
    moved = moved._replace(out=moved.out.transpose(2, 3).contiguous().transpose(2, 3))
    out = AttentionState(*(torch.full_like(x[0], torch.nan) for x in prior))
    state = attend(q, rest, **options, prior=moved, out=out, impl=impl)
    assert state is out
    assert_right(state, q, keys, options)


@every_producer
@pytest.mark.parametrize(
    ("name", "plan"),
    [("fp8_tensor", ""), ("fp8", ""), ("q8_0", ""), ("fp8_tensor", "fixed parts, keys first")],
)
def test_codes_with_scales(name: str, plan: str, impl: str, device: str) -> None:
    """A scale of the call's own values is not one of the prior states."""
    if impl == "torch" and plan:
        pytest.skip("tiles are Triton's")
    case = replace(BASE, dims=(64, 64), dtype=torch.bfloat16, formats=(name, name), device=device)
    q, keys, rest, prior, options = make_prior(case, (3, 20))
    if name == "fp8_tensor":
        assert keys.v_scales is not None and keys.v_scales != 1
    made = PLANS[plan]
    if made is not None:
        made = make_plan(q, rest, cu_seqlens_q=options["cu_seqlens_q"], impl=impl, **made)
    state = attend(q, rest, **options, prior=prior, plan=made, impl=impl)
    assert_right(state, q, keys, options)


@every_producer
def test_equals_a_merge(impl: str, device: str) -> None:
    """Of queries in a padded batch, with a state that is the same for all of them, and of none."""
    case = replace(BASE, q_lens=(2, 2), k_lens=(30, 7), padding=0, device=device)
    q, keys, options = make_inputs(case, 0)
    q = q.view(2, 2, *q.shape[1:])
    given = {"scale": options["scale"], "impl": impl}
    own = attend(q, keys, **given)
    shape = (2, 2, 1, 24)
    one = AttentionState(torch.randn(shape, device=device), torch.randn(shape[:-1], device=device))
    prior = AttentionState(one.out.expand_as(own.out), one.lse.expand_as(own.lse))
    state, merged = attend(q, keys, **given, prior=prior), merge(own, prior)
    for mine, theirs in zip(state, merged, strict=True):
        torch.testing.assert_close(mine, theirs)
    none = AttentionState(*(x[:0] for x in own))
    empty = replace(keys, page_table=keys.page_table[:0], seq_lens=keys.seq_lens[:0])
    stack = AttentionState(*(torch.stack([x, x]) for x in none))
    assert attend(q[:0], empty, **given, prior=stack).out.shape == none.out.shape


def test_compiled_whole() -> None:
    q, keys, rest, prior, options = make_prior(BASE, (3, 20))

    def call(q: torch.Tensor, rest: PagedKV, prior: AttentionState) -> AttentionState:
        return attend(q, rest, **options, prior=prior)

    state = torch.compile(call, fullgraph=True, backend="eager")(q, rest, prior)
    assert_right(state, q, keys, options)


def test_compiled_into_the_memory_of_prior_states() -> None:
    """Where no caller can be told, the prior state is read before it is written."""
    q, keys, rest, prior, options = make_prior(BASE, (20,))
    one = AttentionState(*(x[0] for x in prior))

    def call(q: torch.Tensor, rest: PagedKV, one: AttentionState) -> AttentionState:
        return attend(q, rest, **options, prior=one, out=one)

    state = torch.compile(call, fullgraph=True, backend="eager")(q, rest, one)
    assert_right(state, q, keys, options)


@every_producer
def test_rows_without_keys_are_left(impl: str, device: str) -> None:
    """What is there stays there or becomes the empty state; without `out` it is the empty state."""
    q, keys, options = make_inputs(replace(BASE, q_lens=(1, 3, 1, 2, 1, 2), device=device), 0)
    bounds = options["cu_seqlens_q"]
    plan = make_plan(q, keys, cu_seqlens_q=bounds, leave_empty=True, impl=impl)
    assert_right(attend(q, keys, **options, plan=plan), q, keys, options)
    out = AttentionState(
        q.new_zeros(*q.shape[:2], 24), torch.full(q.shape[:2], -torch.inf, device=device)
    )
    assert_right(attend(q, keys, **options, plan=plan, out=out), q, keys, options)
    sinks = {**options, "sinks": torch.randn(q.shape[1], device=device)}
    assert_right(attend(q, keys, **sinks, plan=plan, out=out), q, keys, sinks)
    if impl == "triton":
        out.out.fill_(7.0)
        out.lse.fill_(7.0)
        attend(q, keys, **options, plan=plan, out=out)
        left = (out.lse == 7.0).all(1)
        assert left.nonzero().flatten().tolist() == [5, 6, 10, 11]  # of no key, of no sequence
        assert torch.equal((out.out == 7.0).all(2).all(1), left)


PRIOR = AttentionState(torch.zeros(9, 4, 24), torch.zeros(9, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"out": PRIOR.out[:, :3]},
            r"prior has shapes \(1, 9, 3, 24\) and \(1, 9, 4\), expected \(1, 9, 4, 24\) and",
        ),
        ({"lse": PRIOR.lse[0]}, r"prior has shapes \(1, 9, 4, 24\) and \(1, 4\), expected"),
        ({"out": PRIOR.out[None].expand(2, -1, -1, -1)}, r"expected \(2, 9, 4, 24\) and \(2, 9, 4"),
        ({"out": PRIOR.out.half()}, "prior.out must be one of float32, got torch.float16"),
        ({"lse": PRIOR.lse.double()}, "prior.lse must be one of float32, got torch.float64"),
        ({"out": PRIOR.out.to("meta")}, "prior.out is on meta, expected cpu"),
        ({"out": PRIOR.out.clone().requires_grad_()}, "prior.out requires grad"),
        (
            {"out": PRIOR.out[None][:0], "lse": PRIOR.lse[None][:0]},
            r"prior holds no state, its out has shape \(0, 9, 4, 24\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_refusals(changes: dict[str, torch.Tensor], message: str) -> None:
    q, keys, options = make_inputs(BASE, 0)
    with pytest.raises(ValueError, match=message):
        attend(q, keys, **options, prior=PRIOR._replace(**changes))


def test_a_destination_that_is_read() -> None:
    q, keys, options = make_inputs(BASE, 0)
    with pytest.raises(ValueError, match=r"out.out overlaps prior.out, which is still to be read"):
        attend(q, keys, **options, prior=PRIOR, out=PRIOR)


@GPU
@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_real_shapes(q_len: int, impl: str | None) -> None:
    """By default the longer queries are Hopper's kernel's, which is followed by a merge."""
    case = Case(
        q_lens=(q_len,) * 3, k_lens=(700, 333, 90), page_size=16, dims=(128, 128), group=4,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    q, keys, rest, prior, options = make_prior(case, (16, 48))
    state = attend(q, rest, **options, prior=prior, impl=impl)
    assert_right(state, q, keys, options)


@GPU
def test_replayed_with_other_states() -> None:
    case = replace(BASE, dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    q, keys, rest, prior, options = make_prior(case, (3, 20))
    held = AttentionState(*(torch.zeros_like(x) for x in prior))
    attend(q, rest, **options, prior=held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = attend(q, rest, **options, prior=held)
    for mine, given in zip(held, prior, strict=True):
        mine.copy_(given)
    graph.replay()
    assert_right(state, q, keys, options)
