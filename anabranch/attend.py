"""attend(): checks, and calls of a kind that was checked before; no device code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch

from anabranch.call import AttendCall, check_packing, check_queries, pack_queries, shape_of
from anabranch.check_states import check_destination, check_unshared
from anabranch.keys import KeySource
from anabranch.keys.source import Identity
from anabranch.launches.prepare import StateLaunches, prepare_state
from anabranch.launches.recorder import Kinds, are_apart, describe, record
from anabranch.merge import merge
from anabranch.plan import Plan, PlanKind, make_plan, plan_call
from anabranch.prior import pack_prior
from anabranch.producers import load_producer
from anabranch.rules import Rules, check_list_rules, check_rules, make_rules
from anabranch.shapes import Sizes
from anabranch.state import AttentionState
from anabranch.traced_call import UNPLANNED, trace_call

NO_STATE = (None, None)


class KnownCall(NamedTuple):
    """What is known of calls of a kind after the first of them was checked."""

    rules: Rules  # without tensors
    sinks_apart: bool  # sinks are merged after the call
    plans: dict[PlanKind, StateLaunches | None]  # those that were checked; None: producers run them


CALLS = Kinds[tuple[Hashable, ...], KnownCall]()


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
    keys          DenseKV, RaggedKV, PagedKV, LatentKV, or SelectedKV, whose lists say which keys a
                  token sees
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
    tensors = (q, cu_seqlens_q, sinks, tree_mask, *(prior or NO_STATE), *(out or NO_STATE))
    new_plan = partial(
        make_plan,
        q,
        keys,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window,
        tree_mask=tree_mask,
        impl=impl,
    )
    identity, kind, known = keys.identity, None, None
    if identity is not None and not check and (described := describe(tensors)) is not None:
        kind = kind_of(identity, described, causal, window, softcap, scale, impl)
        if (known := CALLS.get(kind)) is not None:
            plan = plan or new_plan()
            read = (plan.room, *identity.tensors)
            is_apart = out is None or are_apart(out, (*tensors[:6], *read))
            if is_apart and plan.kind in known.plans:
                return _attend_again(known, keys, plan, tensors, read, prior, out)
    rules = make_rules(
        causal=causal,
        window=window,
        tree_mask=tree_mask,
        softcap=softcap,
        scale=scale,
        sinks=sinks,
        head_dim=q.shape[-1] if q.dim() else 1,
    )
    check_packing(q, keys, cu_seqlens_q)
    sinks_apart = sinks is not None and (keys.lists_per_token or 1) > 1
    if sinks_apart:
        _check_sinks(q, rules)
    call = _bind(q, keys, cu_seqlens_q, prior, rules, sinks_apart)
    _check_call(call, plan, impl)
    if check:
        call.queries.check_content()
        keys.check_content()
    if out is not None:
        _check_out(q, call, out)
    if kind is None:
        state = _attend_unplanned(q, call, plan, out, impl)
    else:
        plan = plan or new_plan()
        if known is None:
            bare = rules._replace(sinks=None, tree_mask=None)
            known = CALLS.keep(kind, KnownCall(bare, sinks_apart, {}))
        state = _attend_first(q, call, plan, out, tensors, known)
    return _merge_sinks(state, sinks) if sinks_apart else state


def kind_of(identity: Identity, described: bytes, *options: Hashable) -> tuple[Hashable, ...]:
    """What a call is known by."""
    return (identity.kind, described, *options, torch.is_grad_enabled())


def _check_sinks(q: torch.Tensor, rules: Rules) -> None:
    """Refuse sinks that are merged after the call, whose sequences have other heads each."""
    sizes = Sizes()
    sizes.bind("num_heads", q.shape[-2], "q")
    check_rules(rules._replace(tree_mask=None), sizes, q.device)


def _check_call(call: AttendCall, plan: Plan | None, impl: str | None) -> None:
    """Refuse queries, rules and plans that do not go with the keys."""
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


def _check_out(q: torch.Tensor, call: AttendCall, out: AttentionState) -> None:
    """Refuse a state that cannot hold the result, or shares memory with what is read."""
    check_destination(out, (*q.shape[:-1], call.keys.head_dim_v), (q.dtype,), q.device)
    if out.out.stride(-1) != 1 < out.out.shape[-1]:
        raise ValueError(
            f"out.out must be contiguous in its last dimension, got strides {out.out.stride()}"
        )
    if not torch.compiler.is_compiling():
        prior = call.prior
        read = {} if prior is None else {"prior.out": prior.out, "prior.lse": prior.lse}
        check_unshared(out, {"q": q, **call.keys.tensors(), **read})


def _bind(
    q: torch.Tensor,
    keys: KeySource,
    cu_seqlens_q: torch.Tensor | None,
    prior: AttentionState | None,
    rules: Rules,
    sinks_apart: bool,
) -> AttendCall:
    """A call as producers take it."""
    queries = pack_queries(q, keys, cu_seqlens_q)
    if keys.lists_per_token is not None:
        check_list_rules(rules)
    if sinks_apart:
        rules = rules._replace(sinks=None)
    if prior is not None:
        prior = pack_prior(prior, q, keys.head_dim_v, queries.packed.shape[:2])
    return AttendCall(queries, keys, rules, keys.view(), prior)


def _attend_again(
    known: KnownCall,
    keys: KeySource,
    plan: Plan,
    tensors: tuple[torch.Tensor | None, ...],
    read: tuple[torch.Tensor | None, ...],
    prior: AttentionState | None,
    out: AttentionState | None,
) -> AttentionState:
    """The state of a call like one that was checked."""
    prepared = known.plans[plan.kind]
    if prepared is not None:
        return prepared.run(tensors[:6], out, read)
    q, cu_seqlens_q, sinks, tree_mask = tensors[:4]
    assert q is not None
    rules = known.rules._replace(sinks=sinks, tree_mask=tree_mask)
    call = _bind(q, keys, cu_seqlens_q, prior, rules, known.sinks_apart)
    state = _attend_shaped(q, call, out, plan.attend)
    return _merge_sinks(state, sinks) if known.sinks_apart else state


def _attend_first(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan,
    out: AttentionState | None,
    tensors: tuple[torch.Tensor | None, ...],
    known: KnownCall,
) -> AttentionState:
    """The state of a call that has been checked, and how the next of the kind is made."""
    known.plans[plan.kind] = None
    is_all = call.prior is None or load_producer(plan.impl).RESUMES
    identity = call.keys.identity
    if known.sinks_apart or not is_all or not q.is_cuda or identity is None:
        return _attend_shaped(q, call, out, plan.attend)
    with record(q.device) as recording:
        state = _attend_shaped(q, call, out, plan.attend)
    known.plans[plan.kind] = prepare_state(
        recording, tensors[:6], state, (plan.room,), identity.tensors
    )
    return state


def _attend_unplanned(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan | None,
    out: AttentionState | None,
    impl: str | None,
) -> AttentionState:
    """The state of a call of which nothing is remembered."""
    if torch.compiler.is_compiling():
        return _attend_shaped(q, call, out, partial(trace_call, plan=plan, impl=impl))
    plan = plan or plan_call(call, UNPLANNED, impl)
    return _attend_shaped(q, call, out, plan.attend)


def _attend_shaped(
    q: torch.Tensor,
    call: AttendCall,
    out: AttentionState | None,
    run: Callable[[AttendCall, AttentionState | None], AttentionState],
) -> AttentionState:
    """The state in the shape of `q`."""
    if out is not None:
        return _attend_into(q, call, out, run)
    state = run(call, None)
    if call.queries.packed.shape != q.shape:
        state = AttentionState(*(x.view(*q.shape[:-1], *x.shape[2:]) for x in state))
    return state


def _merge_sinks(state: AttentionState, sinks: torch.Tensor | None) -> AttentionState:
    assert sinks is not None
    return merge(state, AttentionState.sink(sinks, state), out=state)


def _attend_into(
    q: torch.Tensor,
    call: AttendCall,
    out: AttentionState,
    run: Callable[[AttendCall, AttentionState | None], AttentionState],
) -> AttentionState:
    """Write into a state of the shape of `q`."""
    shape = call.queries.packed.shape[:2]
    if q.dim() == 3 and q.shape[1] == shape[1]:
        run(call, out)
        return out
    rows = AttentionState(*(x.reshape(*shape, *x.shape[q.dim() - 1 :]) for x in out))
    run(call, rows)
    folds_heads = q.shape[-2] != shape[1]
    for mine, written in zip(out, rows, strict=True):
        viewed = mine.is_contiguous() or not folds_heads
        if not viewed or mine.stride(0) != mine.stride(1) * mine.shape[1]:  # rows are a copy
            mine.copy_(written.view(mine.shape))
    return out
