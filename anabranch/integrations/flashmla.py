"""FlashMLA: LSE in natural log; heads before tokens when decoding, after them in prefill.

`flash_mla_with_kvcache` returns [batch, heads, tokens], `flash_mla_sparse_fwd` [tokens, heads]
(flash_mla/flash_mla_interface.py). A row without keys has +inf (tests/ref.py). Sparse prefill was
base 2 until 2026. With `attn_sink` the output holds the sink and the LSE does not: no state.
"""

from __future__ import annotations

import math

import torch

from anabranch.integrations.empty_rows import clear_rows
from anabranch.shapes import Sizes
from anabranch.state import AttentionState


def from_flashmla(
    out: torch.Tensor, softmax_lse: torch.Tensor, *, log2: bool = False
) -> AttentionState:
    """The state of `out` [batch, tokens, heads, dim] with `softmax_lse` [batch, heads, tokens].

    Or, from prefill, of [tokens, heads, dim] with [tokens, heads]. Base 2 if `log2`.
    """
    sizes, decoding = Sizes(), out.dim() == 4
    sizes.match("out", out, "batch tokens heads head_dim" if decoding else "tokens heads head_dim")
    sizes.match("softmax_lse", softmax_lse, "batch heads tokens" if decoding else "tokens heads")
    lse = softmax_lse.mT if decoding else softmax_lse
    return clear_rows(out, lse * math.log(2) if log2 else lse, lse.isinf())


def to_flashmla(state: AttentionState) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse), the output as it is; rows without keys have +inf."""
    lse = state.lse.masked_fill(state.lse == -torch.inf, torch.inf)
    return state.out, lse.mT if state.out.dim() == 4 else lse
