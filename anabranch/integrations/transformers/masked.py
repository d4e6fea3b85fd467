"""Attention under any mask, for what `attend` has no rule for: a score for every pair."""

from __future__ import annotations

import torch


def attend_masked(
    q: torch.Tensor,  # [num_seqs, num_heads, q_len, head_dim_k]
    k: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim_k]
    v: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim_v]
    mask: torch.Tensor,  # [1 or num_seqs, 1 or num_heads, 1 or q_len, k_len], bool or additive
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [num_heads]
) -> torch.Tensor:
    """The output [num_seqs, q_len, num_heads, head_dim_v]; 0 where a token sees no key."""
    num_seqs, num_heads, q_len, head_dim = q.shape
    num_kv_heads, k_len = k.shape[1:3]
    _check(mask, (num_seqs, num_heads, q_len, k_len))
    q = q.reshape(num_seqs, num_kv_heads, -1, q_len, head_dim)
    scores = (q @ k[:, :, None].mT).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    groups = num_kv_heads if mask.shape[1] > 1 else 1
    mask = mask.reshape(mask.shape[0], groups, -1, *mask.shape[2:])
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(num_kv_heads, -1, 1, 1))
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0))
    return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous()


def _check(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    sizes = tuple(mask.shape)
    fits = mask.dim() == 4 and sizes[3] == shape[3]
    if not fits or any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)):
        raise ValueError(f"attention_mask must broadcast to {shape}, got {sizes}")
    if not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise ValueError(f"attention_mask must be bool or floating point, got {mask.dtype}")
