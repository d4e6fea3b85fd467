"""What every key source says of itself: this is all that the rest of the package knows of one."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import ClassVar, NamedTuple, Self

import torch

from anabranch.keys.columns import KeyColumns
from anabranch.keys.view import KeyView
from anabranch.launches.recorder import Kinds, describe
from anabranch.shapes import FLOATS, Sizes, check_ascending, check_device, check_dtype, read_index


class KeyLengths(NamedTuple):
    """How many keys sequences have, on the device. With neither, each fills its storage."""

    seq_lens: torch.Tensor | None = None  # int32 [num_seqs]
    cu_seqlens: torch.Tensor | None = None  # int32 [num_seqs + 1]; sequences are packed


class Identity(NamedTuple):
    """What calls over a source are known by: equal kinds differ in pointers alone."""

    kind: Hashable
    tensors: tuple[torch.Tensor | None, ...]


CHECKED = Kinds[Hashable, None]()


class KeySource:
    """Keys and values of several sequences. A subclass is frozen data, checked when made."""

    __slots__ = ()
    kind: ClassVar[str]  # its name in the table of kinds
    is_contiguous: ClassVar[bool] = False  # keys of a sequence follow each other in memory
    identity: Identity | None  # None where nothing is remembered of calls
    lists_per_token: int | None = None  # of keys that a token has, each a sequence of some heads

    def check(self) -> None:
        """Refuse tensors that do not go together."""
        raise NotImplementedError

    def identify(self, tensors: tuple[torch.Tensor | None, ...], *static: Hashable) -> None:
        """Check the source, unless one of its kind was checked before."""
        described = describe(tensors)
        if described is None:
            self.check()
            return
        kind = (self.kind, described, static)
        if kind not in CHECKED:
            self.check()
            CHECKED.keep(kind, None)
        object.__setattr__(self, "identity", Identity(kind, tensors))

    @property
    def num_seqs(self) -> int:
        raise NotImplementedError

    @property
    def num_kv_heads(self) -> int:
        raise NotImplementedError

    @property
    def head_dim_k(self) -> int:
        """Columns of a head of a key."""
        raise NotImplementedError

    @property
    def head_dim_v(self) -> int:
        """Columns of a head of a value."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries which the keys go with."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where all of it lies."""
        raise NotImplementedError

    @property
    def capacity(self) -> int:
        """Keys of one sequence that the storage can hold."""
        raise NotImplementedError

    @property
    def total_capacity(self) -> int:
        """Keys of all sequences together that the storage can hold."""
        return self.num_seqs * self.capacity

    @property
    def page_size(self) -> int:
        """Keys in a page; 1 where there are no pages."""
        return 1

    @property
    def lengths(self) -> KeyLengths:
        """How many keys each sequence has."""
        raise NotImplementedError

    def view(self) -> KeyView:
        """The source as kernels see it."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by the name of its field, in the order in which `rebuild` takes them."""
        raise NotImplementedError

    def static(self) -> list[int]:
        """What `rebuild` needs beside the tensors."""
        return []

    @classmethod
    def rebuild(cls, tensors: list[torch.Tensor], static: list[int]) -> Self:
        """The source again, from `tensors()` and `static()`."""
        del static
        return cls(*tensors)

    def gather(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one sequence, in order: [k_len, num_kv_heads, dim]."""
        raise NotImplementedError

    def columns(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> KeyColumns:
        """The last `k_len` keys of sequences of these lengths, side by side, for the CPU.

        `starts` [num_seqs] is the column of each sequence's first key; columns before it may hold
        any key of that sequence. None if no sequence is shorter than `k_len`.
        """
        raise NotImplementedError

    def column_weights(
        self, seqs: list[int], lens: list[int], k_len: int, starts: torch.Tensor | None
    ) -> torch.Tensor | None:
        """What is added to the logits of the keys that `columns` returns, or None."""
        del seqs, lens, k_len, starts

    def key_lens(self) -> list[int]:
        """How many keys each sequence has, read from the device."""
        seq_lens, cu_seqlens = self.lengths
        if cu_seqlens is not None:
            return [stop - start for start, stop in pairwise(read_index(cu_seqlens))]
        return [self.capacity] * self.num_seqs if seq_lens is None else read_index(seq_lens)

    def check_content(self) -> None:
        """Validate what lies in device memory, naming the sequence that is wrong. Synchronises."""
        seq_lens, cu_seqlens = self.lengths
        if cu_seqlens is not None:
            bounds = read_index(cu_seqlens)
            check_ascending("cu_seqlens", bounds)
            if bounds[0] < 0 or bounds[-1] > self.total_capacity:
                raise ValueError(
                    "cu_seqlens must run from 0 or more to at most num_keys = "
                    f"{self.total_capacity}, got {bounds[0]} to {bounds[-1]}"
                )
        for seq, length in enumerate([] if seq_lens is None else read_index(seq_lens)):
            if not 0 <= length <= self.capacity:
                raise ValueError(
                    f"sequence {seq} has seq_len {length}, its storage holds 0 to {self.capacity}"
                )
            self.check_sequence(seq, length)

    def check_sequence(self, seq: int, length: int) -> None:
        """Validate what a sequence of this length reads beside its keys."""


class KeysAndValues(KeySource):
    """A source whose fields `k` and `v` end in [num_kv_heads, head_dim]."""

    __slots__ = ()
    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim_k(self) -> int:
        return self.k.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device


def check_pair(k: torch.Tensor, v: torch.Tensor, rows: str) -> Sizes:
    """Refuse keys and values that do not go together; their sizes by name."""
    sizes = Sizes()
    sizes.match("k", k, f"{rows} num_kv_heads head_dim_k")
    sizes.match("v", v, f"{rows} num_kv_heads head_dim_v")
    check_dtype("k", k, FLOATS)
    check_dtype("v", v, (k.dtype,))
    check_device("v", v, k.device)
    return sizes


def check_index(argument: str, index: torch.Tensor, device: torch.device) -> None:
    """Refuse lengths or tables that kernels cannot read."""
    check_dtype(argument, index, (torch.int32,))
    check_device(argument, index, device)
    if index.dim() and index.shape[-1] > 1 and index.stride(-1) != 1:
        need = f"{argument} must be contiguous in its last dimension"
        raise ValueError(f"{need}, got strides {index.stride()}")
