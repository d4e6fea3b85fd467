"""Random weights in the formats of GGUF files, with the numbers they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anabranch.kernels.cpu.linear import WeightPart
from anabranch.kernels.cpu.tiles import TILES, pack_tiles

SCALES = {"Q6_K": (208,)}  # where a block has its halves: numbers, not codes
TWO_HALVES = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_rows(name: str, n: int, k: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """Rows of blocks uint8 [n, bytes], and their numbers in float32 [n, k] as gguf reads them."""
    gguf = __import__("gguf")
    draw, kind = np.random.default_rng(seed), TILES[name]
    if kind.read is None:
        numbers = torch.from_numpy(draw.standard_normal((n, k))).to(
            torch.float16 if name == "F16" else torch.bfloat16
        )
        return numbers.view(torch.uint8).numpy(), numbers.float()
    blocks = draw.integers(0, 256, (n, k // kind.span, kind.block_bytes), dtype=np.uint8)
    size = 3e-4 if name.endswith("_K") else 0.01  # sub-scales are up to 63 or 127
    for start in SCALES.get(name, (0, 2) if name in TWO_HALVES else (0,)):
        halves = (draw.standard_normal(blocks.shape[:2]) * size).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    rows = blocks.reshape(n, -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return rows, torch.from_numpy(values).reshape(n, k)


def random_part(name: str, n: int, k: int, seed: int = 0) -> tuple[WeightPart, torch.Tensor]:
    """A packed weight and its numbers."""
    rows, values = random_rows(name, n, k, seed)
    return WeightPart(name, n, torch.from_numpy(pack_tiles(rows, TILES[name], k))), values
