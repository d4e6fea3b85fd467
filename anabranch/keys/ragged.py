"""Packed sequences of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from anabranch.keys.columns import KeyColumns, ScatteredColumns, ViewedColumns, last_positions
from anabranch.keys.source import Identity, KeyLengths, KeysAndValues, check_index, check_pair
from anabranch.keys.view import PLAIN, KeyStore, KeyView


@dataclass(frozen=True, slots=True)
class RaggedKV(KeysAndValues):
    """Packed sequences; sequence i holds rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`."""

    kind: ClassVar[str] = "ragged"
    is_contiguous: ClassVar[bool] = True
    k: torch.Tensor  # [num_keys, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_keys, num_kv_heads, head_dim_v]
    cu_seqlens: torch.Tensor  # int32 [num_seqs + 1]
    identity: Identity | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.identify((self.k, self.v, self.cu_seqlens))

    def check(self) -> None:
        """Keys, values and where sequences begin."""
        check_pair(self.k, self.v, "num_keys")
        check_index("cu_seqlens", self.cu_seqlens, self.k.device)
        if self.cu_seqlens.dim() != 1 or not self.cu_seqlens.shape[0]:
            shape = tuple(self.cu_seqlens.shape)
            raise ValueError(f"cu_seqlens must be [num_seqs + 1], got shape {shape}")

    @property
    def num_seqs(self) -> int:
        """How many sequences are packed."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def capacity(self) -> int:
        """One sequence may be all there is."""
        return self.k.shape[0]

    @property
    def total_capacity(self) -> int:
        """Sequences share the storage."""
        return self.k.shape[0]

    @property
    def lengths(self) -> KeyLengths:
        return KeyLengths(cu_seqlens=self.cu_seqlens)

    def view(self) -> KeyView:
        """A sequence is one long page, which may begin at any key."""
        return KeyView(self._store(self.k), self._store(self.v), None, 1)

    @staticmethod
    def _store(rows: torch.Tensor) -> KeyStore:
        key, head, dim = rows.stride()
        return KeyStore(rows, key, key, head, dim, PLAIN)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Keys, values and where sequences begin."""
        return {"k": self.k, "v": self.v, "cu_seqlens": self.cu_seqlens}

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one sequence."""
        start, stop = (int(bound) for bound in self.cu_seqlens[seq : seq + 2])
        return self.k[start:stop], self.v[start:stop]

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """Views where sequences are neighbours of one length, else copies."""
        num_seqs, length = len(seqs), lens[0]
        if seqs[-1] - seqs[0] != num_seqs - 1 or min(lens) != max(lens):
            rows = (
                last_positions(lens, k_len, starts) + self.cu_seqlens[torch.tensor(seqs)][:, None]
            )
            return ScatteredColumns(self.k[None], self.v[None], torch.zeros_like(rows), rows)
        first = int(self.cu_seqlens[seqs[0]])
        rows = slice(first, first + num_seqs * length)
        shape, columns = (num_seqs, length, self.num_kv_heads), slice(length - k_len, length)
        return ViewedColumns(
            self.k[rows].view(*shape, self.head_dim_k)[:, columns],
            self.v[rows].view(*shape, self.head_dim_v)[:, columns],
        )
