"""GGUF's blocks as codes with a scale, and perhaps a zero, for each 16 or 32 columns: for GPUs.

`number = (code - zero) * scale`. Scales and zeros have 16 bits: those of Q4_0, Q5_0, Q8_0 and
IQ4_NL lose nothing by that, others up to 2^-10 of the largest number that a group can hold.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from anabranch.kernels.cpu.tiles import ROWS_AT_ONCE, TILES, Blocks, Bytes

Floats = npt.NDArray[np.float32]
LARGEST_ZERO = 2.0**15  # of a group; beyond, codes change its numbers less than rounding does
IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


class Groups(NamedTuple):
    """Of codes from 0 on: `number = code * scale + minimum`."""

    scales: Floats  # [n, groups]
    minima: Floats | None


class CodeFormat(NamedTuple):
    """How a format of GGUF becomes codes."""

    bits: int  # of a code as it is kept
    middle: int  # the code that is kept as 0, or with 4 bits counts as 0 without a zero
    groups: Callable[[Blocks], Groups]


def _halves(head: Bytes) -> Floats:
    return np.ascontiguousarray(head).view(np.float16)[..., 0].astype(np.float32)


def _flat(blocks: Floats) -> Floats:
    return blocks.reshape(len(blocks), -1)


def _scales(blocks: Blocks) -> Groups:
    return Groups(_flat(_halves(blocks.head[0])), None)


def _scales_and_minima(blocks: Blocks) -> Groups:
    return Groups(*(_flat(_halves(each)) for each in blocks.head))


def _sub_scales_and_minima(blocks: Blocks) -> Groups:
    d, least, scales, minima = blocks.head
    return Groups(_flat(_halves(d) * scales[..., 0]), _flat(_halves(least) * minima[..., 0]) * -1)


def _sub_scales(blocks: Blocks) -> Groups:
    d, scales = blocks.head
    return Groups(_flat(_halves(d) * scales.view(np.int8)[..., 0]), None)


FORMATS = {
    "Q4_0": CodeFormat(4, 8, _scales),
    "Q4_1": CodeFormat(4, 8, _scales_and_minima),
    "Q4_K": CodeFormat(4, 8, _sub_scales_and_minima),
    "Q5_0": CodeFormat(8, 16, _scales),
    "Q5_1": CodeFormat(8, 16, _scales_and_minima),
    "Q5_K": CodeFormat(8, 16, _sub_scales_and_minima),
    "Q6_K": CodeFormat(8, 32, _sub_scales),
    "Q8_0": CodeFormat(8, 128, _scales),
    "IQ4_NL": CodeFormat(8, 0, _scales),
}


def code_tensors(raw: Bytes, name: str, k: int) -> dict[str, torch.Tensor] | None:
    """Tensors of a layer, named and laid out as compressed-tensors packs it, with zeros as floats.

    `raw` are rows of blocks [n, bytes]. None where they are kept as numbers: in other formats,
    where a scale is infinite, and where a row is one group with a zero.
    """
    kind = FORMATS.get(name)
    if kind is None or k % TILES[name].span:
        return None
    starts = range(0, len(raw), ROWS_AT_ONCE)
    pieces = [_rows(raw[start : start + ROWS_AT_ONCE], name, kind) for start in starts]
    if any(piece is None for piece in pieces):
        return None
    columns: Any = zip(*pieces, strict=True)
    codes, scales, zeros = (None if each[0] is None else np.concatenate(each) for each in columns)
    layer = {"weight_packed": codes, "weight_scale": scales, "weight_zero_point": zeros}
    tensors = {key: torch.from_numpy(value) for key, value in layer.items() if value is not None}
    return tensors | {"weight_shape": torch.tensor([len(raw), k])}


def _rows(
    raw: Bytes, name: str, kind: CodeFormat
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16], npt.NDArray[np.float16] | None] | None:
    """Words of 32 bits, scales and zeros of some rows."""
    read: Any = TILES[name].read
    blocks: Blocks = read(raw.reshape(len(raw), -1, TILES[name].block_bytes))
    scales, minima = kind.groups(blocks)
    codes = IQ4_NL[blocks.codes] if name == "IQ4_NL" else blocks.codes - np.uint8(kind.middle)
    signed = codes.view(np.int8).reshape(*scales.shape, -1)  # by groups
    zeros = None
    if minima is not None:
        if scales.shape[1] == 1 or not np.isfinite(minima).all():
            return None
        scales, zeros, flat = _zeros(scales, minima, kind)
        signed = np.where(flat[..., None], np.int8(1), signed)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        return None
    if kind.bits == 8:
        words = (signed.view(np.uint8) ^ 128).reshape(len(raw), -1)
    else:
        pairs = (signed + np.int8(8)).view(np.uint8).reshape(len(raw), -1, 2)
        words = pairs[..., 0] | pairs[..., 1] << 4
        zeros = None if zeros is None else zeros + 8
    return words.view(np.int32), halves, None if zeros is None else zeros.astype(np.float16)


def _zeros(
    scales: Floats, minima: Floats, kind: CodeFormat
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Scales, the signed code of 0, and which groups are one number: a code of 1 by its scale."""
    flat = np.abs(minima) > LARGEST_ZERO * np.abs(scales)
    zeros = -minima / np.where(scales == 0, np.float32(1), scales) - kind.middle
    middle = minima + scales * np.float32((2 * kind.middle - 1) / 2)
    return np.where(flat, middle, scales), np.where(flat, np.float32(0), zeros), flat
