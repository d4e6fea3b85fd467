"""torch's CPU flash kernel as a producer of states: grouped heads, masks, split keys."""

from __future__ import annotations

import torch

from anabranch.state import AttentionState, merge_stacked

MAX_FOLDED_LEN = 16  # longer queries fill the kernel's tiles without folding
SPLIT_KEYS = 512  # all heads of a part stay in the cache: 10 to 30% faster than one long range
MIN_BYTES_TO_SPLIT = 8 << 20  # of keys and values; below, the merge costs what is gained
MAX_SPLITS = 64  # bounds the partial states

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def flash(
    q: torch.Tensor,  # [num_seqs, q_len, num_heads, head_dim]
    k: torch.Tensor,  # [num_seqs, k_len, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_seqs, k_len, num_kv_heads, head_dim]
    *,
    scale: float,
    causal: bool = False,  # row i sees keys 0 to i
    mask: torch.Tensor | None = None,  # bool [num_seqs or 1, 1, q_len or 1, k_len]
) -> AttentionState:
    """The state of every query, out [num_seqs, q_len, num_heads, head_dim]."""
    q_len, num_heads = q.shape[1:3]
    num_kv_heads = k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    same_for_rows = not causal and (mask is None or mask.shape[2] == 1)
    if not same_for_rows or not worth_folding(q_len, num_heads // num_kv_heads):
        out, lse = _call_kernel(q.transpose(1, 2), k, v, scale, causal, mask)
        return AttentionState(out.transpose(1, 2), lse.transpose(1, 2))
    rows = _fold(q, num_kv_heads)
    num_splits = 1
    if len(q) == 1 and mask is None and q_len <= MAX_FOLDED_LEN:
        num_splits = select_num_splits(k.nbytes + v.nbytes, k.shape[2], num_kv_heads)
    if num_splits > 1:
        state = _call_split(rows, k, v, scale, num_splits)
    else:
        state = _call_kernel(rows, k, v, scale, mask=mask)
    return AttentionState(*(_unfold(x, q_len, num_heads) for x in state))


def worth_folding(q_len: int, group: int) -> bool:
    """Whether a group of heads fills better tiles together than one head alone.

    The kernel's tiles have 32 rows, or 256 from 768 rows on (12% faster at 512 tokens, group 4).
    """
    return q_len <= MAX_FOLDED_LEN or q_len < 768 <= q_len * group


def select_num_splits(num_bytes: int, k_len: int, num_kv_heads: int) -> int:
    """Into how many parts to cut the keys of one sequence, for the cache and for idle threads."""
    wanted = MAX_SPLITS
    if num_bytes < MIN_BYTES_TO_SPLIT:
        wanted = -(-torch.get_num_threads() // num_kv_heads)
    return max(min(wanted, k_len // SPLIT_KEYS), 1)


def _fold(q: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Rows are (token, head in group), so that keys are read once for a group."""
    num_seqs, q_len, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    if q_len > 1:
        rows = q.reshape(num_seqs, q_len, num_kv_heads, group, head_dim)
        return rows.transpose(1, 2).flatten(2, 3)
    rows = q.reshape(num_seqs, num_kv_heads, group, head_dim)
    if group == 1 and q.dtype != torch.float32:
        # one 16-bit row takes a path of the kernel 5 times slower than two rows
        rows = rows.repeat(1, 1, 2, 1)
    return rows


def _unfold(x: torch.Tensor, q_len: int, num_heads: int) -> torch.Tensor:
    """[num_seqs, num_kv_heads, rows, ...] as [num_seqs, q_len, num_heads, ...]."""
    num_seqs, num_kv_heads, num_rows, *dims = x.shape
    group = num_heads // num_kv_heads
    if num_rows > q_len * group:
        x = x[:, :, : q_len * group]
    if q_len > 1:
        x = x.unflatten(2, (q_len, group)).transpose(1, 2)
    return x.reshape(num_seqs, q_len, num_heads, *dims)


def _call_split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, num_splits: int
) -> AttentionState:
    """One sequence, its keys cut into equal parts side by side in the batch, and a remainder."""
    size = k.shape[2] // num_splits
    rest = num_splits * size
    parts = [x[0, :, :rest].unflatten(1, (num_splits, size)).transpose(0, 1) for x in (k, v)]
    states = [_call_kernel(q.expand(num_splits, -1, -1, -1), *parts, scale)]
    if rest < k.shape[2]:
        states.append(_call_kernel(q, k[:, :, rest:], v[:, :, rest:], scale))
    merged = merge_stacked(AttentionState(*map(torch.cat, zip(*states, strict=True))))
    return AttentionState(merged.out[None].to(q.dtype), merged.lse[None])


def _call_kernel(
    q: torch.Tensor,  # [num_seqs, num_heads, q_len, head_dim]
    k: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim]
    v: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim]
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> AttentionState:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # it reads rows
    if mask is None:
        out, lse = _kernel(q, k, v, 0.0, causal, scale=scale)
    else:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        out, lse = _kernel(q, k, v, attn_mask=bias, scale=scale)
        # the kernel says lse = 0 where a row sees nothing
        lse.masked_fill_(~mask.any(-1), -torch.inf)
    return AttentionState(out, lse)
