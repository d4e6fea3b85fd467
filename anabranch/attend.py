"""attend(): checks, and calls of a kind that was checked before; no device code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from anabranch.call import AttendCall, shape_of
from anabranch.destination import check_destination, check_unshared
from anabranch.keys import KeySource
from anabranch.launches.allocation import allocate
from anabranch.launches.call_kinds import Kinds, are_apart, describe
from anabranch.launches.recorder import PreparedLaunches, prepare, record
from anabranch.merge import merge
from anabranch.plan import Plan, PlanKind, make_plan
from anabranch.prior import pack_prior
from anabranch.producers import load_producer
from anabranch.queries import check_queries, pack_queries
from anabranch.rules import Rules, check_list_rules, check_rules, make_rules
from anabranch.shapes import Sizes
from anabranch.state import AttentionState
from anabranch.traced_call import attend_call, trace_call

NO_STATE = (None, None)


class PreparedCall(NamedTuple):
    """How calls of a kind run: a new state, unless one is given, and what writes it."""

    launches: PreparedLaunches
    shape: tuple[int, ...]  # of a new state's `out`
    strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


# Calls that have been checked, by the kind of their plans; None: these run the long way
CALLS = Kinds[tuple[Any, ...] | None, dict[PlanKind, PreparedCall | None]]()


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
    identity, kind = keys.identity, None
    if identity is not None and not check and (described := describe(tensors)) is not None:
        given = (causal, window, softcap, scale, impl, torch.is_grad_enabled())
        kind = (identity.kind, described, *given)
    if (known := CALLS.get(kind)) is not None:
        plan = plan or new_plan()
        prepared = known.get(plan.kind)
        if prepared is not None and identity is not None:
            read = (plan.room, *identity.tensors)
            if out is None or are_apart(out, (*tensors[:6], *read)):
                return _run(prepared, tensors, read, out)
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
        call = call._replace(prior=prior)
    if out is not None:
        _check_out(q, call, out)
    if kind is None or identity is None:
        state = _attend_shaped(q, call, plan, out, impl)
    else:
        plan = plan or new_plan()
        known = CALLS.keep(kind, {}) if known is None else known
        state = _attend_recorded(q, call, plan, out, tensors, known, sinks_apart is None)
    if sinks_apart is None:
        return state
    return merge(state, AttentionState.sink(sinks_apart, state), out=state)


def _run(
    prepared: PreparedCall,
    tensors: tuple[torch.Tensor | None, ...],
    read: tuple[torch.Tensor | None, ...],
    out: AttentionState | None,
) -> AttentionState:
    (run, launches, _), shape, strides, lse_strides, dtype, device = prepared
    if out is not None:
        run(launches, (*tensors, *read))
        return out
    state = AttentionState(
        allocate(shape, strides, dtype, device),
        allocate(shape[:-1], lse_strides, torch.float32, device),
    )
    run(launches, (*tensors[:6], *state, *read))
    return state


def _attend_recorded(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan,
    out: AttentionState | None,
    tensors: tuple[torch.Tensor | None, ...],
    known: dict[PlanKind, PreparedCall | None],
    is_all: bool,  # nothing follows that would have to run again
) -> AttentionState:
    """The long way, which says how the next call of the kind can do without it."""
    is_all = is_all and (call.prior is None or load_producer(plan.impl).RESUMES)
    if not is_all or plan.kind in known:
        known[plan.kind] = None
        return _attend_shaped(q, call, plan, out, plan.impl)
    with record() as recording:
        state = _attend_shaped(q, call, plan, out, plan.impl)
    identity = call.keys.identity
    assert identity is not None
    found = prepare(recording, (*tensors[:6], *state), (plan.room,), identity.tensors)
    known[plan.kind] = None
    if found is not None:
        shape, strides = tuple(state.out.shape), state.out.stride()
        known[plan.kind] = PreparedCall(
            found, shape, strides, state.lse.stride(), q.dtype, q.device
        )
    return state


def _attend_shaped(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan | None,
    out: AttentionState | None,
    impl: str | None,
) -> AttentionState:
    """The state in the shape of `q`."""
    run = trace_call if torch.compiler.is_compiling() else attend_call
    if out is not None:
        return _attend_into(q, call, plan, out, impl, run)
    state = run(call, plan, impl, None)
    if call.queries.packed.shape != q.shape:
        state = AttentionState(*(x.view(*q.shape[:-1], *x.shape[2:]) for x in state))
    return state


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


def _attend_into(
    q: torch.Tensor,
    call: AttendCall,
    plan: Plan | None,
    out: AttentionState,
    impl: str | None,
    run: Callable[..., AttentionState],
) -> AttentionState:
    """Write into a state of the shape of `q`."""
    shape = call.queries.packed.shape[:2]
    if q.dim() == 3 and q.shape[1] == shape[1]:
        run(call, plan, impl, out)
        return out
    rows = AttentionState(*(x.reshape(*shape, *x.shape[q.dim() - 1 :]) for x in out))
    run(call, plan, impl, rows)
    folds_heads = q.shape[-2] != shape[1]
    for mine, written in zip(out, rows, strict=True):
        viewed = mine.is_contiguous() or not folds_heads
        if not viewed or mine.stride(0) != mine.stride(1) * mine.shape[1]:  # rows are a copy
            mine.copy_(written.view(mine.shape))
    return out
