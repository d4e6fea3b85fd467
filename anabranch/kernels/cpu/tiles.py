"""GGUF's blocks as tiles of 16 outputs side by side: `matrix.h` has the order of a tile's bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PANEL = 16  # outputs of a tile
CHUNK = 32  # columns of a chunk: 8 vectors of four columns each
ROWS_AT_ONCE = 4096  # bounds the memory that packing takes

Bytes = npt.NDArray[np.uint8]


class Blocks(NamedTuple):
    """Blocks of rows taken apart: what a tile begins with, and a code for every column."""

    head: list[Bytes]  # [n, blocks, count, bytes]: scales, minima, those of sub-blocks
    codes: Bytes  # [n, blocks, span], unsigned


class TileFormat(NamedTuple):
    """A format of GGUF as kernels read it."""

    code: int  # as kernels number formats
    span: int  # columns of a block
    block_bytes: int
    head_bytes: int  # of an output
    num_bits: int  # of a code
    read: Callable[[Bytes], Blocks] | None  # of [n, blocks, block_bytes]; 16-bit floats: None

    @property
    def tile_bytes(self) -> int:
        """Of a tile: 16 outputs by `span` columns."""
        return PANEL * self.head_bytes + self.span * self.num_bits * PANEL // 8


def num_bytes(kind: TileFormat, n: int, k: int) -> int:
    """Of a packed weight [n, k]."""
    return -(-n // PANEL) * (k // kind.span) * kind.tile_bytes


def pack_tiles(raw: Bytes, kind: TileFormat, k: int) -> Bytes:
    """Rows of blocks [n, bytes] as tiles [panels, tiles, tile_bytes]; the last panel is filled up.

    Raises a ValueError where the rows are not of `k` columns.
    """
    if k % kind.span or raw.shape[1] != k // kind.span * kind.block_bytes:
        raise ValueError(f"rows of {k} columns cannot have {raw.shape[1]} bytes in this format")
    panels = -(-len(raw) // PANEL)
    tiles = np.empty((panels, k // kind.span, kind.tile_bytes), np.uint8)
    for first in range(0, len(raw), ROWS_AT_ONCE):
        rows = raw[first : first + ROWS_AT_ONCE]
        count = -(-len(rows) // PANEL)
        rows = np.pad(rows, ((0, count * PANEL - len(rows)), (0, 0)))
        blocks = rows.reshape(len(rows), -1, kind.block_bytes)
        start = first // PANEL
        tiles[start : start + count] = _tiles(blocks, kind)
    return tiles


def _tiles(blocks: Bytes, kind: TileFormat) -> Bytes:
    """[16 panels, blocks, bytes] as [panels, blocks, tile_bytes]."""
    panels, spans = len(blocks) // PANEL, blocks.shape[1]
    if kind.read is None:
        values = blocks.reshape(panels, PANEL, spans, CHUNK, 2)
        return values.transpose(0, 2, 3, 1, 4).reshape(panels, spans, -1)
    head, codes = kind.read(blocks)
    pieces = [
        each.reshape(panels, PANEL, spans, *each.shape[2:])
        .transpose(0, 2, 3, 1, 4)
        .reshape(panels, spans, -1)
        for each in head
    ]
    vectors = codes.reshape(panels, PANEL, spans, -1, 8, 4).transpose(0, 2, 3, 4, 1, 5)
    bits = _split_bits(vectors.reshape(panels, spans, -1, 8, PANEL * 4), kind.num_bits)
    return np.concatenate([*pieces, bits.reshape(panels, spans, -1)], -1)


def _split_bits(vectors: Bytes, num_bits: int) -> Bytes:
    """[..., 8, 64] as high bits and then low bits of chunks, [..., bytes]."""
    if num_bits == 8:
        return vectors.reshape(*vectors.shape[:-2], -1)
    low, high = vectors & 15, vectors >> 4
    pieces = [low[..., :4, :] | low[..., 4:, :] << 4]
    if num_bits == 5:
        places = np.arange(8, dtype=np.uint8)[:, None]
        pieces.insert(0, np.bitwise_or.reduce(high << places, -2, keepdims=True))
    if num_bits == 6:
        places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        pairs = high.reshape(*high.shape[:-2], 2, 4, -1) << places
        pieces.insert(0, np.bitwise_or.reduce(pairs, -2))
    return np.concatenate(pieces, -2).reshape(*vectors.shape[:-2], -1)


def _nibbles(packed: Bytes) -> Bytes:
    return np.concatenate([packed & 15, packed >> 4], -1)


def _halves(blocks: Bytes, count: int) -> list[Bytes]:
    """The first 16-bit numbers of every block, each by itself."""
    return [blocks[..., None, 2 * i : 2 * i + 2] for i in range(count)]


def _read_4(blocks: Bytes, num_halves: int) -> Blocks:
    return Blocks(_halves(blocks, num_halves), _nibbles(blocks[..., 2 * num_halves :]))


def _read_5(blocks: Bytes, num_halves: int) -> Blocks:
    start = 2 * num_halves
    high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return Blocks(_halves(blocks, num_halves), _nibbles(blocks[..., start + 4 :]) | high << 4)


def _read_8(blocks: Bytes) -> Blocks:
    return Blocks(_halves(blocks, 1), blocks[..., 2:] ^ 128)


def _sub_scales(packed: Bytes) -> list[Bytes]:
    """Scales and minima of 6 bits, 8 of each in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = [first & 63, third & 15 | first >> 6 << 4]
    minima = [second & 63, third >> 4 | second >> 6 << 4]
    return [np.concatenate(each, -1)[..., None] for each in (scales, minima)]


def _read_4_k(blocks: Bytes) -> Blocks:
    nibbles = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    head = _halves(blocks, 2) + _sub_scales(blocks[..., 4:16])
    return Blocks(head, nibbles.reshape(*blocks.shape[:-1], 256))


def _read_5_k(blocks: Bytes) -> Blocks:
    lead = blocks.shape[:-1]
    low = _nibbles(blocks[..., 48:].reshape(*lead, 4, 32)).reshape(*lead, 256)
    places = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[..., None, 16:48] >> places & 1) << 4
    head = _halves(blocks, 2) + _sub_scales(blocks[..., 4:16])
    return Blocks(head, low | high.reshape(low.shape))


def _read_6_k(blocks: Bytes) -> Blocks:
    lead = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*lead, 2, 1, 32) >> places & 3
    head = [blocks[..., None, 208:210], blocks[..., 192:208, None]]
    return Blocks(head, (low | high << 4).reshape(*lead, 256))


TILES = {
    "F16": TileFormat(1, 32, 64, 0, 16, None),
    "BF16": TileFormat(2, 32, 64, 0, 16, None),
    "Q4_0": TileFormat(3, 32, 18, 2, 4, lambda blocks: _read_4(blocks, 1)),
    "Q4_1": TileFormat(4, 32, 20, 4, 4, lambda blocks: _read_4(blocks, 2)),
    "Q5_0": TileFormat(5, 32, 22, 2, 5, lambda blocks: _read_5(blocks, 1)),
    "Q5_1": TileFormat(6, 32, 24, 4, 5, lambda blocks: _read_5(blocks, 2)),
    "Q8_0": TileFormat(7, 32, 34, 2, 8, _read_8),
    "IQ4_NL": TileFormat(8, 32, 18, 2, 4, lambda blocks: _read_4(blocks, 1)),
    "Q4_K": TileFormat(9, 256, 144, 20, 4, _read_4_k),
    "Q5_K": TileFormat(10, 256, 176, 20, 5, _read_5_k),
    "Q6_K": TileFormat(11, 256, 210, 18, 6, _read_6_k),
}
