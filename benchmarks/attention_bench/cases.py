"""What is measured: one frozen dataclass for each kind of case, and how much work a case is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

BENCHES = ("merge", "decode", "verify", "prefill")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class MergeCase:
    """Two states of this shape merged into one."""

    num_tokens: int
    num_heads: int
    head_dim: int = 128
    dtype: str = "float16"
    warm: bool = False  # the same states at every call, which stay in the cache if they fit
    groups: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    bench: Literal["merge"] = "merge"

    @property
    def name(self) -> str:
        """What tables and filters call it."""
        shape = f"T{self.num_tokens} H{self.num_heads} D{self.head_dim} {self.dtype}"
        return f"{shape} warm" if self.warm else shape

    @property
    def work(self) -> int:
        """Bytes: two states read, one written."""
        row = self.head_dim * DTYPES[self.dtype].itemsize + torch.float32.itemsize
        return 3 * self.num_tokens * self.num_heads * row

    @property
    def working_set(self) -> int:
        """Bytes that one rotation of the inputs occupies."""
        return self.work


@dataclass(frozen=True, slots=True)
class AttendCase:
    """Causal attention of `q_len` queries at the end of `seq_len` keys, in every sequence."""

    bench: Literal["decode", "verify", "prefill"]
    num_seqs: int
    seq_len: int
    q_len: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page_size: int = 16
    window: int | None = None
    dtype: str = "bfloat16"
    flex: bool = False  # also time flex attention, which compiles for every shape
    groups: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tables and filters call it."""
        length = "S" if self.bench == "prefill" else "L"
        dims = f"D{self.head_dim}" + self._unless("/", self.head_dim_v, self.head_dim)
        return (
            f"B{self.num_seqs} {length}{self.seq_len} H{self.num_heads}/{self.num_kv_heads} {dims}"
            + (f" q{self.q_len}" if self.bench == "verify" else "")
            + self._unless(" page ", self.page_size, 16)
            + self._unless(" window ", self.window, None)
            + self._unless(" ", self.dtype, "bfloat16")
        )

    @staticmethod
    def _unless(prefix: str, value: object, usual: object) -> str:
        return "" if value == usual else f"{prefix}{value}"

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.q_len

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that some query may attend to."""
        keys = self.seq_len
        if self.window is not None:
            keys = min(keys, self.window + self.q_len - 1)
        row = self.num_kv_heads * (self.head_dim + self.head_dim_v)
        return self.num_seqs * keys * row * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> int:
        """Multiply-adds count two; of a square causal mask half the pairs count."""
        if self.window is None:
            pairs = self.q_len * self.seq_len - self.q_len * self.q_len // 2
        else:
            first = self.seq_len - self.q_len + 1
            pairs = sum(min(keys, self.window) for keys in range(first, self.seq_len + 1))
        return 2 * self.num_seqs * pairs * (self.head_dim + self.head_dim_v) * self.num_heads

    @property
    def work(self) -> int:
        """What the rate counts: operations for a prefill, bytes of keys and values else."""
        return self.flops if self.bench == "prefill" else self.kv_bytes

    @property
    def working_set(self) -> int:
        """Bytes that one rotation of the inputs occupies, as far as they are read."""
        row = self.num_heads * self.head_dim
        return self.kv_bytes + self.num_tokens * row * DTYPES[self.dtype].itemsize


Case = MergeCase | AttendCase
CaseOfBench = TypeVar("CaseOfBench", MergeCase, AttendCase)


def unite(cases: Iterable[CaseOfBench]) -> list[CaseOfBench]:
    """One case for each name, in order of appearance, with the groups and models of all."""
    united: dict[str, CaseOfBench] = {}
    for case in cases:
        known = united.setdefault(case.name, case)
        changes: dict[str, Any] = {
            "groups": tuple(dict.fromkeys(known.groups + case.groups)),
            "models": tuple(dict.fromkeys(known.models + case.models)),
        }
        if isinstance(known, AttendCase) and isinstance(case, AttendCase):
            changes["flex"] = known.flex or case.flex
        united[case.name] = replace(known, **changes)
    return list(united.values())
