"""The oracle: attention in float64, one sequence at a time, written for reading.

Only tests, benchmarks and examples import it. Whatever an implementation does, its parts,
merged, must equal this.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from anabranch.keys import KeySource
from anabranch.state import AttentionState, merge_stacked


def visible(
    q_len: int,
    k_len: int,
    *,
    causal: bool,
    window: int | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query may attend to, bool [q_len, k_len]; queries sit at the end of the keys.

    `causal` hides keys after the query, `window` keeps only the last `window` keys up to it, and
    `tree_mask` [q_len, width] replaces the causal rule among the newest q_len keys.
    """
    positions = torch.arange(k_len - q_len, k_len)[:, None]
    keys = torch.arange(k_len)[None, :]
    mask = torch.ones(q_len, k_len, dtype=torch.bool)
    if tree_mask is not None:
        newest = torch.zeros(q_len, q_len, dtype=torch.bool)
        width = min(q_len, tree_mask.shape[1])
        newest[:, :width] = tree_mask[:, :width]
        shown = min(q_len, k_len)
        mask[:, k_len - shown :] = newest[:, q_len - shown :]
    elif causal:
        mask &= keys <= positions
    if window is not None:
        mask &= keys > positions - window
    return mask


def attention(
    q: torch.Tensor,  # [q_len, num_heads, head_dim_k]
    k: torch.Tensor,  # [k_len, num_kv_heads, head_dim_k]
    v: torch.Tensor,  # [k_len, num_kv_heads, head_dim_v]
    *,
    mask: torch.Tensor | None = None,  # bool [q_len, k_len]
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # [num_heads]
) -> AttentionState:
    """Attention of one sequence, computed where the queries are: float64 out and lse on the CPU."""
    q, k, v = (x.detach().to(q.device, torch.float64) for x in (q, k, v))
    rows = (len(q), k.shape[1], q.shape[1] // k.shape[1])  # tokens, kv heads, heads of each
    grouped = q.reshape(*rows, q.shape[-1])
    scores = torch.einsum("qhgd,khd->qhgk", grouped, k).flatten(1, 2)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, :].to(q.device), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    weights = weights.reshape(*rows, len(k))
    out = torch.einsum("qhgk,khd->qhgd", weights, v).flatten(1, 2)
    state = AttentionState(out.cpu(), lse.cpu())
    if sinks is None:
        return state
    sink = AttentionState.sink(sinks.cpu(), state)
    return merge_stacked(AttentionState(*map(torch.stack, zip(state, sink, strict=True))))


def attend(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim_k]
    keys: KeySource,
    *,
    cu_seqlens_q: torch.Tensor,  # [num_seqs + 1]
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,  # bool [num_tokens, width]
) -> AttentionState:
    """What `anabranch.attend` must return for packed queries; rows of no sequence are empty."""
    shape = (q.shape[0], q.shape[1], keys.head_dim_v)
    state = AttentionState.empty(shape, dtype=torch.float64)
    state = state._replace(lse=state.lse.double())
    bounds = [int(bound) for bound in cu_seqlens_q]
    for seq, (start, stop) in enumerate(pairwise(bounds)):
        k, v = keys.gather(seq)
        tree = None if tree_mask is None else tree_mask[start:stop].cpu()
        mask = visible(stop - start, len(k), causal=causal, window=window, tree_mask=tree)
        part = attention(q[start:stop], k, v, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
        state.out[start:stop], state.lse[start:stop] = part
    return state
