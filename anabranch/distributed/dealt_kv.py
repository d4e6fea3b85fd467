"""Pages dealt out over ranks: which positions a rank holds, and where they lie there.

Page g of a sequence lies on rank `g % num_ranks`, as page `g // num_ranks` of what that rank holds
of the sequence. Local keys keep the order of their positions, so the keys of any range of positions
are a range of local keys. All functions work on the device and need no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.keys import PagedKV


@dataclass(frozen=True, slots=True)
class DealtKV:
    """This rank's pages of sequences whose pages are dealt out over `num_ranks` ranks.

    `page_table` lists the pages of this rank only; `seq_lens` are the lengths of the whole
    sequences, the same on every rank.
    """

    k: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_k]
    v: torch.Tensor  # [num_pages, page_size, num_kv_heads, head_dim_v]
    page_table: torch.Tensor  # int32 [num_seqs, max_pages of this rank]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or not 0 <= self.rank < self.num_ranks:
            raise ValueError(
                f"rank must lie in [0, num_ranks), got {self.rank} of {self.num_ranks}"
            )
        pages = PagedKV(self.k, self.v, self.page_table, self.seq_lens)
        if not pages.num_seqs:
            raise ValueError("dealt keys must hold at least one sequence, got none")

    @property
    def num_seqs(self) -> int:
        """How many sequences the table describes."""
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def local_lens(self) -> torch.Tensor:
        """How many keys of each sequence lie on this rank, int32 [num_seqs]."""
        return self.keys_before(self.seq_lens)

    def keys_before(self, positions: torch.Tensor) -> torch.Tensor:
        """How many keys of this rank stand before each position; none before a negative one."""
        cycle = self.page_size * self.num_ranks
        positions = positions.clamp_min(0)
        rest = (positions % cycle - self.rank * self.page_size).clamp(0, self.page_size)
        return positions // cycle * self.page_size + rest

    def positions_of(self, keys: torch.Tensor) -> torch.Tensor:
        """The position in its sequence of each local key."""
        page = keys // self.page_size * self.num_ranks + self.rank
        return page * self.page_size + keys % self.page_size

    def most_keys(self, num_positions: int) -> int:
        """An upper bound for the keys of this rank among so many neighbouring positions."""
        cycles, rest = divmod(num_positions, self.page_size * self.num_ranks)
        most = cycles * self.page_size + min(rest, self.page_size)
        return min(most, self.page_table.shape[1] * self.page_size)

    def slots_of(self, seqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots for `append_kv`: where these positions of these sequences lie; -1 on other ranks.

        A negative position stands for a token that is not to be written.
        """
        page = positions.clamp_min(0) // self.page_size
        own = (positions >= 0) & (page % self.num_ranks == self.rank)
        if not self.page_table.shape[1]:
            return torch.full_like(positions, -1)
        column = (page // self.num_ranks).clamp_max(self.page_table.shape[1] - 1)
        slots = self.page_table[seqs, column] * self.page_size + positions % self.page_size
        return torch.where(own, slots, -1)


def deal_table(page_table: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's own table from that of all pages, whose column g counts pages of rank g % num_ranks.

    The result is contiguous, [num_seqs, ceil((max_pages - rank) / num_ranks)].
    """
    if page_table.dim() != 2:
        shape = tuple(page_table.shape)
        raise ValueError(f"page_table must be [num_seqs, max_pages], got shape {shape}")
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ValueError(f"rank must lie in [0, num_ranks), got {rank} of {num_ranks}")
    return page_table[:, rank::num_ranks].contiguous()
