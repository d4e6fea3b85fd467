"""From latent rows to the keys and values of every head, and how queries do without them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional


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
        nope, shape = self.head_dim_nope, self.weight.shape[:2]
        both = functional.linear(rows[:, : self.rank], self.weight.flatten(0, 1))
        both = both.view(len(rows), *shape)
        k = both.new_empty(len(rows), shape[0], nope + rows.shape[1] - self.rank)
        k[..., :nope] = both[..., :nope]
        k[..., nope:] = rows[:, None, self.rank :]
        return k, both[..., nope:]

    def bytes_per_key(self, width: int) -> int:
        """What a key takes while it is expanded: its row, projected, and with rotary columns."""
        heads, both, rank = self.weight.shape
        numbers = width + heads * (both + self.head_dim_nope + width - rank)
        return numbers * self.weight.element_size()

    def prefers_expanded(self, num_queries: float, width: int) -> bool:
        """Whether keys with so many queries each cost fewer operations expanded than absorbed.

        Expanding takes `rank` operations for each column of a head's key and value; a query then
        meets those columns instead of a whole row and its latent part.
        """
        _, both, rank = self.weight.shape
        saved = width + rank - (both + width - rank)
        return num_queries * saved > rank * both
