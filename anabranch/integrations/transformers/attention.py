"""The attention of a layer of a transformers model, over what its cache returns."""

from __future__ import annotations

from typing import Any

import torch

from anabranch import DenseKV, RaggedKV, attend
from anabranch.integrations.transformers.decode_step import attend_step
from anabranch.integrations.transformers.masked import attend_masked
from anabranch.integrations.transformers.spans import is_spans


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [num_seqs, num_heads, q_len, head_dim]
    key: torch.Tensor,  # [num_seqs, num_kv_heads, k_len, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for `attn_implementation="anabranch"`.

    The mask, of `make_mask` or the user's own, says who sees what, windows included; without one,
    all tokens of the sequence are new, or one is. Returns [num_seqs, q_len, num_heads, head_dim].
    """
    check_supported(query, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux}
    if attention_mask is not None and not is_spans(attention_mask):
        return attend_masked(query, key, value, attention_mask, **options), None
    if query.shape[2] == 1 and query.is_cuda:
        out = attend_step(query, key, value, attention_mask, **options)
        if out is not None:
            return out, None
    if attention_mask is not None:
        return _attend_spans(query, key, value, attention_mask, options), None
    return _attend_whole(query, key, value, _is_causal(module, is_causal), options), None


def check_supported(query: torch.Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse what would otherwise be left out silently."""
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("anabranch is for inference: run the model under torch.inference_mode()")
    if dropout:
        raise ValueError(f"anabranch is for inference, got dropout={dropout}; call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True needs attn_implementation='eager'")
    if kwargs.get("position_bias") is not None:
        raise ValueError("position_bias, as T5 has it, needs attn_implementation='eager'")


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    if is_causal is not None:
        return is_causal
    config = getattr(module, "config", None)
    return getattr(module, "is_causal", True) and getattr(config, "is_causal", True)


def _attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, options: dict[str, Any]
) -> torch.Tensor:
    q_len, k_len = q.shape[2], k.shape[2]
    if causal and q_len not in (1, k_len):
        raise ValueError(
            f"{q_len} queries and {k_len} keys without a mask: where the queries stand is not known"
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, DenseKV(k, v), causal=causal and q_len > 1, **options).out


def _attend_spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Sequences and the gaps between them are packed keys, read in place; gaps have no queries."""
    num_seqs, num_heads, q_len = q.shape[:3]
    k_len, window = k.shape[2], spans.shape[2]
    steps = torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device)
    k, v, rows = _pack(k, v)
    cu_seqlens = (spans[:, 0, 0] + (steps[:-1] * rows)[:, None]).flatten()
    state = attend(
        q.transpose(1, 2).reshape(num_seqs * q_len, num_heads, -1),
        RaggedKV(k, v, cu_seqlens),
        cu_seqlens_q=(steps * q_len).repeat_interleave(2)[1:-1],
        window=window if window < k_len else None,
        **options,
    )
    return state.out.view(num_seqs, q_len, num_heads, -1)


def _pack(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values as rows of one dimension, and how many rows apart sequences begin."""
    rows = _rows_apart(k)
    if rows is None or rows != _rows_apart(v):
        k, v = k.contiguous(), v.contiguous()
        rows = k.shape[1] * k.shape[2]
    num_rows = (k.shape[0] - 1) * rows + k.shape[2]
    k, v = (
        x.as_strided((num_rows, x.shape[1], x.shape[3]), (x.stride(2), x.stride(1), x.stride(3)))
        for x in (k, v)
    )
    return k, v, rows


def _rows_apart(x: torch.Tensor) -> int | None:
    num_seqs, _, length, _ = x.shape
    if num_seqs == 1:
        return length
    rows, rest = divmod(x.stride(0), x.stride(2)) if x.stride(2) else (0, 0)
    return rows if not rest and rows >= length else None
