"""A padded batch of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from anabranch.keys.columns import KeyColumns, ScatteredColumns, ViewedColumns, last_positions
from anabranch.keys.source import Identity, KeyLengths, KeysAndValues, check_index, check_pair
from anabranch.keys.view import KeyView, store_of


@dataclass(frozen=True, slots=True)
class DenseKV(KeysAndValues):
    """A padded batch; sequence i has `seq_lens[i]` keys, or all of them without `seq_lens`."""

    kind: ClassVar[str] = "dense"
    is_contiguous: ClassVar[bool] = True
    k: torch.Tensor  # [num_seqs, max_len, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_seqs, max_len, num_kv_heads, head_dim_v]
    seq_lens: torch.Tensor | None = None  # int32 [num_seqs]
    identity: Identity | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.identify((self.k, self.v, self.seq_lens))

    def check(self) -> None:
        sizes = check_pair(self.k, self.v, "num_seqs max_len")
        if self.seq_lens is not None:
            check_index("seq_lens", self.seq_lens, self.k.device)
            sizes.match("seq_lens", self.seq_lens, "num_seqs")

    @property
    def num_seqs(self) -> int:
        """How many sequences the batch holds."""
        return self.k.shape[0]

    @property
    def capacity(self) -> int:
        """Keys of a sequence with its padding."""
        return self.k.shape[1]

    @property
    def lengths(self) -> KeyLengths:
        return KeyLengths(seq_lens=self.seq_lens)

    def view(self) -> KeyView:
        """A sequence is one long page."""
        return KeyView(store_of(self.k), store_of(self.v), None, self.k.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Keys, values and, where there are any, lengths."""
        pair = {"k": self.k, "v": self.v}
        return pair if self.seq_lens is None else pair | {"seq_lens": self.seq_lens}

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one sequence, without its padding."""
        length = self.k.shape[1] if self.seq_lens is None else int(self.seq_lens[seq])
        return self.k[seq, :length], self.v[seq, :length]

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """Views where sequences are neighbours of one length, else copies."""
        if seqs[-1] - seqs[0] != len(seqs) - 1 or min(lens) != max(lens):
            rows = last_positions(lens, k_len, starts)
            return ScatteredColumns(
                self.k, self.v, torch.tensor(seqs)[:, None].expand_as(rows), rows
            )
        if (len(seqs), k_len) == self.k.shape[:2]:
            return ViewedColumns(self.k, self.v)
        some = slice(seqs[0], seqs[-1] + 1), slice(lens[0] - k_len, lens[0])
        return ViewedColumns(self.k[some], self.v[some])
