"""attend(): checks, the choice of a producer, and torch operators; no device code."""

from __future__ import annotations

from typing import cast

import torch

from anabranch.call import AttendCall, PlanOptions, shape_of
from anabranch.destination import check_destination, check_unshared
from anabranch.keys import KeySource, flatten_source, rebuild_source
from anabranch.merge import merge
from anabranch.plan import Plan
from anabranch.prior import merge_prior, pack_prior
from anabranch.producers import RESUMING, ResumingProducer, choose_producer, load_producer
from anabranch.queries import Queries, check_queries, pack_queries
from anabranch.rules import Rules, check_list_rules, check_rules, make_rules
from anabranch.shapes import Sizes
from anabranch.state import AttentionState

UNPLANNED = PlanOptions()


def attend(
    q: torch.Tensor,
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    plan: Plan | None = None,
    prior: AttentionState | None = None,
    out: AttentionState | None = None,
    check: bool = False,
    impl: str | None = None,
) -> AttentionState:
    """Attend from `q` to `keys`: decode, speculative verify, chunked prefill or a mix, in one call.

    q             packed [num_tokens, num_heads, dim] with `cu_seqlens_q` (int32 [num_seqs + 1];
                  without it one token a sequence), or padded [num_seqs, q_len, num_heads, dim]
    keys          DenseKV, RaggedKV, PagedKV, or SelectedKV, whose lists say which keys a token sees
    causal        a token sees the keys up to its own; queries stand at the end of the keys
    window        a token sees at most this many keys, counted back from its own
    softcap       logits become softcap * tanh(logit / softcap)
    scale         of the scores, 1 / sqrt(dim) by default
    sinks         [num_heads]: a logit for each head whose value is zero
    tree_mask     bool [num_tokens, width]: which of its sequence's new tokens a token sees, in the
                  place of the causal rule among them
    plan          from make_plan() with the same options, to be shared by the layers of a step
    prior         a state in the shape of the result over other keys, or a stack of such states in
                  dimension 0, which the result includes as if merge() had been called; Triton's
                  kernels go on from them, without another launch
    out           the state to write into, whose `out` is contiguous in its last dimension
    check         also validate lengths and page indices, which waits for the device
    impl          "torch", "triton" or "gluon"; by default ANABRANCH_ATTEND, then the first that can

    Tokens that see no key, and rows beyond `cu_seqlens_q[-1]`, get out 0 and lse -inf. Returns the
    state in the shape of `q`. Not differentiable.
    """
    rules = make_rules(
        causal=causal,
        window=window,
        tree_mask=tree_mask,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        head_dim=q.shape[-1] if q.dim() else 1,
    )
    queries = pack_queries(q, keys, cu_seqlens_q)
    sinks_apart = None
    if keys.lists_per_token is not None:
        check_list_rules(rules)
        if keys.lists_per_token > 1 and sinks is not None:
            sinks_apart, rules = _check_sinks(q, rules), rules._replace(sinks=None)
    call = AttendCall(queries, keys, rules, keys.view())
    _check(call, plan, impl)
    if check:
        queries.check_content()
        keys.check_content()
    if prior is not None:
        prior = pack_prior(prior, q, keys.head_dim_v, queries.packed.shape[:2])
    if out is not None:
        state = _attend_into(q, call, plan, prior, out, impl)
    else:
        run = _attend_traced if torch.compiler.is_compiling() else _attend
        state = run(call, plan, impl, prior, None)
        if queries.packed.shape != q.shape:
            state = AttentionState(*(x.view(*q.shape[:-1], *x.shape[2:]) for x in state))
    if sinks_apart is None:
        return state
    return merge(state, AttentionState.sink(sinks_apart, state), out=state)


def _check_sinks(q: torch.Tensor, rules: Rules) -> torch.Tensor | None:
    """Sinks that are merged after the call, whose sequences have other heads each."""
    sizes = Sizes()
    sizes.bind("num_heads", q.shape[-2], "q")
    check_rules(rules._replace(tree_mask=None), sizes, q.device)
    return rules.sinks


def _check(call: AttendCall, plan: Plan | None, impl: str | None) -> None:
    q, keys = call.queries.packed, call.keys
    sizes = check_queries(q, keys)
    check_rules(call.rules, sizes, q.device)
    if torch.is_grad_enabled():
        given = {"q": q, **keys.tensors(), "sinks": call.rules.sinks}
        for name, tensor in given.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} requires grad; attend is for inference, detach it")
    if plan is not None:
        plan.check(shape_of(call))
        if impl not in (None, plan.impl):
            raise ValueError(f"the plan was made by {plan.impl!r}, got impl={impl!r}")


def _attend(
    call: AttendCall,
    plan: Plan | None,
    impl: str | None,
    prior: AttentionState | None,
    out: AttentionState | None,
) -> AttentionState:
    """By the producer that made the plan, or the one that is asked for or found."""
    name = choose_producer(call, UNPLANNED, impl) if plan is None else plan.impl
    producer, work = load_producer(name), None if plan is None else plan.work
    if prior is not None and name in RESUMING:
        return cast("ResumingProducer", producer).attend(call, work, out, prior)
    return merge_prior(producer.attend(call, work, out), prior)


def _attend_into(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan | None,
    prior: AttentionState | None,
    out: AttentionState,
    impl: str | None,
) -> AttentionState:
    """Write into a state of the shape of `q`."""
    check_destination(out, (*q.shape[:-1], call.keys.head_dim_v), (q.dtype,), q.device)
    if out.out.stride(-1) != 1 < out.out.shape[-1]:
        raise ValueError(
            f"out.out must be contiguous in its last dimension, got strides {out.out.stride()}"
        )
    run = _attend_traced
    if not torch.compiler.is_compiling():
        read = {} if prior is None else {"prior.out": prior.out, "prior.lse": prior.lse}
        check_unshared(out, {"q": q, **call.keys.tensors(), **read})
        run = _attend
    shape = call.queries.packed.shape[:2]
    if q.dim() == 3 and q.shape[1] == shape[1]:
        run(call, plan, impl, prior, out)
        return out
    rows = AttentionState(*(x.reshape(*shape, *x.shape[q.dim() - 1 :]) for x in out))
    run(call, plan, impl, prior, rows)
    folds_heads = q.shape[-2] != shape[1]
    for mine, written in zip(out, rows, strict=True):
        viewed = mine.is_contiguous() or not folds_heads
        if not viewed or mine.stride(0) != mine.stride(1) * mine.shape[1]:  # rows are a copy
            mine.copy_(written.view(mine.shape))
    return out


def _attend_traced(
    call: AttendCall,
    plan: Plan | None,
    impl: str | None,
    prior: AttentionState | None,
    out: AttentionState | None,
) -> AttentionState:
    """By an operator, which a tracer takes whole."""
    queries, keys, rules, _ = call
    arguments = (
        queries.packed,
        queries.starts(),
        *flatten_source(keys),
        *rules,
        impl if plan is None else plan.impl,
        [] if plan is None else plan.tensors,
        None if plan is None else plan.text,
    )
    if out is not None and prior is None:
        torch.ops.anabranch.attend_into(*out, *arguments)
        return out
    state = merge_prior(AttentionState(*torch.ops.anabranch.attend(*arguments)), prior)
    if out is None:
        return state
    for mine, found in zip(out, state, strict=True):
        mine.copy_(found)  # a prior state is read before `out`, which may be the same, is written
    return out


@torch.library.custom_op("anabranch::attend", mutates_args=())
def _attend_op(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    impl: str | None,
    plan_tensors: list[torch.Tensor],  # scratch: what is written there nobody else reads
    plan_text: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rules = Rules(causal, window, softcap, scale, sinks, tree_mask)
    keys = rebuild_source(kind, key_tensors, key_static)
    return _run(q, cu_seqlens_q, keys, rules, impl, plan_tensors, plan_text, None)


@_attend_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim_v = rebuild_source(kind, key_tensors, key_static).head_dim_v
    shape = (q.shape[0], q.shape[1], head_dim_v)
    return q.new_empty(shape), q.new_empty(shape[:2], dtype=torch.float32)


@torch.library.custom_op("anabranch::attend_into", mutates_args=("out", "lse"))
def _attend_into_op(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    kind: str,
    key_tensors: list[torch.Tensor],
    key_static: list[int],
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    impl: str | None,
    plan_tensors: list[torch.Tensor],
    plan_text: str | None,
) -> None:
    rules = Rules(causal, window, softcap, scale, sinks, tree_mask)
    keys = rebuild_source(kind, key_tensors, key_static)
    state = AttentionState(out, lse)
    _run(q, cu_seqlens_q, keys, rules, impl, plan_tensors, plan_text, state)


@_attend_into_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(*_: object) -> None:
    pass


def _run(
    q: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    keys: KeySource,
    rules: Rules,
    impl: str | None,
    plan_tensors: list[torch.Tensor],
    plan_text: str | None,
    out: AttentionState | None,
) -> AttentionState:
    """A call from the arguments of an operator; what was traced is checked already."""
    call = AttendCall(Queries(q, cu_seqlens_q, 0, keys.num_seqs), keys, rules, keys.view())
    if plan_text is None:
        return load_producer(choose_producer(call, UNPLANNED, impl)).attend(call, None, out)
    assert impl is not None
    producer = load_producer(impl)
    return producer.attend(call, producer.rebuild_plan(plan_tensors, plan_text), out)
