"""Tuning tables: frozen dataclasses and pure functions that select one, evidence beside them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Rows (token, head) merged by one program."""

    block_rows: int
    num_warps: int


def select_merge(head_dim: int) -> MergeConfig:
    """At least 2048 elements a program: one row a program is dispatch-bound."""
    padded = 1 << (head_dim - 1).bit_length()
    return MergeConfig(block_rows=max(1, 2048 // padded), num_warps=4)
