"""The attention state, its one convention, and the merge written as mathematics.

Attention over a set of keys leaves `out = sum softmax(s)_i v_i` and `lse = log sum exp(s_i)`.
States over disjoint key sets merge into the state over their union; everything else in this
package produces states or merges them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """What attention over a set of keys leaves behind.

    `lse` has the shape of `out` without its last dimension, float32, natural logarithm, and is
    -inf where no key was attended; there `out` is exactly 0.
    """

    out: torch.Tensor  # [..., head_dim]
    lse: torch.Tensor  # [...]

    @staticmethod
    def empty(
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> AttentionState:
        """The state over no keys, the identity of the merge. `shape` is that of `out`."""
        out = torch.zeros(shape, dtype=dtype, device=device)
        return AttentionState(out, torch.full(shape[:-1], -torch.inf, device=device))

    @staticmethod
    def sink(logits: torch.Tensor, like: AttentionState) -> AttentionState:
        """The state of a key with these logits and a value of zero, one logit for each head."""
        lse = logits.to(like.lse).expand(like.lse.shape)
        return AttentionState(torch.zeros_like(like.out), lse.contiguous())


def merge_stacked(stacked: AttentionState) -> AttentionState:
    """The definition of the merge, over dimension 0, in float32 or wider.

    A pivot keeps the exponentials finite; where every part is empty it is 0, so that the
    weights are exp(-inf) = 0 rather than exp(-inf + inf) = nan. An LSE of NaN or +inf, which no
    state has, gives NaN.
    """
    out, lse = stacked
    wide = torch.promote_types(out.dtype, torch.float32)
    peak = lse.amax(0)
    pivot = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(lse - pivot)
    total = weights.sum(0)
    share = torch.where(total == 0, 0.0, weights / total)
    merged = (share.unsqueeze(-1).to(wide) * out.to(wide)).sum(0)
    return AttentionState(merged, pivot + torch.log(total))
