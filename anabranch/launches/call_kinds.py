"""Kinds of calls: equal ones have the same launches, but for the pointers of their tensors."""

from __future__ import annotations

from typing import TypeVar

import torch

from anabranch.launches.compile_ahead import is_ahead
from anabranch.launches.extension import load_launches

Kind = TypeVar("Kind")
Known = TypeVar("Known")
MOST_KINDS = 8192  # a step of prompts has its own number of tokens, and so its own kinds


class Kinds(dict[Kind, Known]):
    """What is known of kinds, all of it forgotten when there are too many."""

    def keep(self, kind: Kind, known: Known) -> Known:
        """Remember what a kind of call needs."""
        if len(self) >= MOST_KINDS:
            self.clear()
        self[kind] = known
        return known


def describe(tensors: tuple[torch.Tensor | None, ...]) -> bytes | None:
    """Shapes, strides, dtypes, alignments and device of tensors, of which the first is given.

    None where calls cannot be prepared: on a CPU, under a tracer, without a C compiler, and where
    kernels are compiled only.
    """
    first = tensors[0]
    if torch.compiler.is_compiling() or first is None or not first.is_cuda or is_ahead():
        return None
    launches = load_launches()
    return None if launches is None else launches.describe(tensors)


def are_apart(written: tuple[torch.Tensor, ...], read: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether tensors that were described before share no memory; what interleaves shares it."""
    launches = load_launches()
    return launches is not None and launches.is_apart(tuple(written), read)
