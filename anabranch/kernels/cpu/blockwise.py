"""Online softmax over tiles of keys, in matmuls: for what torch's flash kernel cannot do.

That is softcap, log-weights of keys, and head_dim_k != head_dim_v, where padding for that kernel is
slower than this.
"""

from __future__ import annotations

import torch

from anabranch.kernels.cpu.batches import Batch
from anabranch.kernels.cpu.masks import Visibility
from anabranch.state import AttentionState

BLOCK_M = 128
BLOCK_N = 512


def attend_blockwise(
    batch: Batch, visibility: Visibility, head_dim_v: int, *, scale: float, softcap: float | None
) -> AttentionState:
    """The state of every query; no more than one tile of scores exists at a time."""
    num_seqs, q_len, num_heads, _ = batch.q.shape
    shape = (num_seqs, q_len, num_heads, head_dim_v)
    state = AttentionState.empty(shape, dtype=batch.q.dtype)
    for start in range(0, q_len, BLOCK_M):
        rows = slice(start, min(start + BLOCK_M, q_len))
        q = batch.q[:, rows].transpose(1, 2).float()
        out, lse = _attend_rows(q, batch, visibility, rows, head_dim_v, scale, softcap)
        state.out[:, rows] = out.transpose(1, 2)
        state.lse[:, rows] = lse.transpose(1, 2)
    return state


def _attend_rows(
    q: torch.Tensor,  # float32 [num_seqs, num_heads, rows, head_dim_k]
    batch: Batch,
    visibility: Visibility,
    rows: slice,
    head_dim_v: int,
    scale: float,
    softcap: float | None,
) -> AttentionState:
    peak = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(peak), q.new_zeros(*q.shape[:3], head_dim_v)
    columns = visibility.columns(rows)
    for start in range(columns.start, columns.stop, BLOCK_N):
        keys = slice(start, min(start + BLOCK_N, columns.stop))
        # [num_seqs, num_kv_heads, keys, dim]: a tile of keys is read once for a group of heads
        k, v = (x.transpose(1, 2).float() for x in batch.columns.read(keys))
        scores = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ k.transpose(2, 3)
        scores = scores.view(*q.shape[:3], -1)
        if softcap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / softcap).tanh_().mul_(softcap)
        if batch.log_weights is not None:
            scores.add_(batch.log_weights[:, None, None, keys])
        mask = visibility.tile(rows, keys)
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        # -inf stays in the running peak; only the pivot is made safe
        pivot = new_peak.masked_fill(new_peak == -torch.inf, 0.0)
        weights = scores.sub_(pivot).exp_()
        decay = torch.exp(peak - pivot)
        total = total * decay + weights.sum(-1, keepdim=True)
        values = weights.unflatten(1, (k.shape[1], -1)).flatten(2, 3) @ v
        acc = acc * decay + values.view(*q.shape[:3], -1)
        peak = new_peak
    out = torch.where(total > 0, acc / total, 0.0)
    return AttentionState(out, (peak + total.log())[..., 0])
