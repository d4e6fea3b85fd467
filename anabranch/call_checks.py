"""Checks of a call of attend(): none of them reads device memory."""

from __future__ import annotations

import torch

from anabranch.call import AttendCall, check_queries, shape_of
from anabranch.check_states import check_destination, check_unshared
from anabranch.plan import Plan
from anabranch.rules import Rules, check_rules
from anabranch.shapes import Sizes
from anabranch.state import AttentionState


def check_sinks(q: torch.Tensor, rules: Rules) -> None:
    """Refuse sinks that are merged after the call, whose sequences have other heads each."""
    sizes = Sizes()
    sizes.bind("num_heads", q.shape[-2], "q")
    check_rules(rules._replace(tree_mask=None), sizes, q.device)


def check_call(call: AttendCall, plan: Plan | None, impl: str | None) -> None:
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


def check_out(q: torch.Tensor, call: AttendCall, out: AttentionState) -> None:
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
