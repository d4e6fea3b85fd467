"""Byte-pair encoding of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from anabranch.kernels.cpu.native import native

if TYPE_CHECKING:
    import numpy.typing as npt


class BytePairs(NamedTuple):
    """Which tokens merge into which, by the ids of tokens."""

    byte_tokens: npt.NDArray[np.int32]  # [256], -1 where a byte is no token
    keys: npt.NDArray[np.int64]  # [num_pairs], left << 32 | right, ascending
    merged: npt.NDArray[np.int32]  # [num_pairs, 2], rank and token


def merge_pairs(text: bytes, ends: npt.NDArray[np.int64], pairs: BytePairs) -> list[int] | None:
    """The tokens of the words that end at `ends`; None where the kernel does not take one.

    It may be too long or have a byte that is no token. Of all pairs of neighbours in a word, the
    one of the lowest rank is merged first.
    """
    tokens = np.empty(len(text), np.int32)
    addresses = [each.ctypes.data for each in (ends, *pairs, tokens)]
    count = native().merge_pairs(text, *addresses, len(ends), len(pairs.keys))
    return None if count < 0 else tokens[:count].tolist()
