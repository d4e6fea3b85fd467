"""States over other keys that a call of attend() is merged with."""

from __future__ import annotations

import torch

from anabranch.check_states import check_state
from anabranch.merge import merge
from anabranch.state import AttentionState


def pack_prior(
    prior: AttentionState, q: torch.Tensor, head_dim_v: int, rows: torch.Size
) -> AttentionState:
    """States of the shape of `q`, one or a stack, as a stack [num_states, *rows, head_dim_v]."""
    if prior.out.dim() <= q.dim():
        prior = AttentionState(*(x[None] for x in prior))
    num_states = prior.out.shape[0]
    if not num_states:
        raise ValueError(f"prior holds no state, its out has shape {tuple(prior.out.shape)}")
    shape = (num_states, *q.shape[:-1], head_dim_v)
    check_state("prior", prior, shape, (q.dtype,), q.device)
    for name, tensor in (("prior.out", prior.out), ("prior.lse", prior.lse)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; attend is for inference, detach it")
    return AttentionState(*(x.reshape(num_states, *rows, *x.shape[q.dim() :]) for x in prior))


def merge_prior(state: AttentionState, prior: AttentionState) -> AttentionState:
    """Merge a stack into a state, in place."""
    states = (AttentionState(*each) for each in zip(*prior, strict=True))
    return merge(state, *states, out=state)
