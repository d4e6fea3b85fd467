"""From latent rows to the keys and values of every head, and how queries do without them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.compositions.prompt_workspace import ExpandedKeys
from anabranch.device import has_overlap

# Tokens up to which a kernel of our own is faster. 16 heads, H200, us there and by torch: one token
# 1.9 and 5.3, 64 3.3 and 6.1, 256 4.8 and 7.3. Values are not: 64 tokens 4.0 and 3.9.
FEW_TOKENS = 256


class UpProjection(NamedTuple):
    """The weight that makes keys and values of a latent row, for each head keys before values.

    A row has `rank` latent columns, then rotary columns that all heads share. A key of a head is
    its `head_dim_nope` projected columns, then the rotary ones.
    """

    weight: torch.Tensor  # [num_heads, head_dim_nope + head_dim_v, rank]
    head_dim_nope: int

    @property
    def rank(self) -> int:
        """Latent columns of a row."""
        return self.weight.shape[2]

    @property
    def head_dim_v(self) -> int:
        """Columns of a value of one head."""
        return self.weight.shape[1] - self.head_dim_nope

    def check(self, q: torch.Tensor, width: int) -> None:
        """Refuse queries [num_tokens, num_heads, dim] or rows of this width that do not fit."""
        expected = (self.weight.shape[0], self.head_dim_nope + width - self.rank)
        if q.dim() != 3 or tuple(q.shape[1:]) != expected or width < self.rank:
            raise ValueError(
                f"rows of {width} columns and an up-projection {tuple(self.weight.shape)} with "
                f"{self.head_dim_nope} columns of keys need q [num_tokens, "
                f"{expected[0]}, {expected[1]}], got {tuple(q.shape)}"
            )

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [num_tokens, num_heads, dim] that score latent rows as they are."""
        rank, nope = self.rank, self.head_dim_nope
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[2] - nope)
        if _are_few(q) and self.weight.stride(2) == 1:
            from anabranch.kernels.layers.absorb_queries import absorb_queries

            absorb_queries(q, self.weight, absorbed, overlap=has_overlap(q.device))
            return absorbed
        latent = absorbed[..., :rank].transpose(0, 1)
        torch.bmm(q[..., :nope].transpose(0, 1), self.weight[:, :nope], out=latent)
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def values(self, latent: torch.Tensor) -> torch.Tensor:
        """Outputs [num_tokens, num_heads, head_dim_v] of outputs over latent rows."""
        out = latent.new_empty(*latent.shape[:2], self.head_dim_v)
        weight = self.weight[:, self.head_dim_nope :].transpose(1, 2)
        torch.bmm(latent.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_keys, num_heads, dim] of rows [num_keys, width]."""
        num_heads = self.weight.shape[0]
        k, v = self.new_expanded(rows, num_heads)
        self.expand_heads(rows, slice(0, num_heads), k, v)
        return k, v

    def new_expanded(self, rows: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the keys and values of so many heads, in which rotary columns are written."""
        k, v = self.expanded(rows.shape[1]).allocate(len(rows), num_heads)
        k[..., self.head_dim_nope :] = rows[:, None, self.rank :]
        return k, v

    def expand_heads(
        self, rows: torch.Tensor, heads: slice, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write the projected columns of the keys and values of some heads."""
        nope, weight = self.head_dim_nope, self.weight[heads].transpose(1, 2)
        latent = rows[:, : self.rank].expand(len(weight), -1, -1)
        torch.bmm(latent, weight[..., :nope], out=k[..., :nope].transpose(0, 1))
        torch.bmm(latent, weight[..., nope:], out=v.transpose(0, 1))

    def expanded(self, width: int, page_size: int = 0) -> ExpandedKeys:
        """The keys and values of rows of this width, which are gathered in whole pages."""
        weight = self.weight
        dims = self.head_dim_nope + width - self.rank, self.head_dim_v
        where = weight.dtype, weight.device
        row_bytes = width * weight.element_size()
        return ExpandedKeys(weight.shape[0], 1, *dims, *where, row_bytes, 2 * page_size)

    def prefers_expanded(self, num_queries: float, width: int) -> bool:
        """Whether keys with so many queries each cost fewer operations expanded than absorbed.

        Expanding takes `rank` operations for each column of a head's key and value; a query then
        meets those columns instead of a whole row and its latent part.
        """
        _, both, rank = self.weight.shape
        saved = width + rank - (both + width - rank)
        return num_queries * saved > rank * both


def _are_few(x: torch.Tensor) -> bool:
    """Whether a kernel of our own absorbs these queries [num_tokens, num_heads, dim]."""
    on_gpu = x.is_cuda and x.element_size() == 2 and not torch.compiler.is_compiling()
    return on_gpu and 0 < len(x) <= FEW_TOKENS
