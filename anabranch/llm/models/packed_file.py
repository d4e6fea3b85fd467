"""Packed weights on disk: in the formats of a GGUF file and in the order of CPU kernels."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anabranch.kernels.cpu.linear import WeightPart

DATA, INDEX = "weights.packed", "weights.json"
PLAIN = "plain"  # float32 in its own order
ALIGNMENT = 64  # bytes of a cache line


class KeptWeight(NamedTuple):
    """A weight of a file: packed, or plain float32."""

    format: str  # F32 or one of TILES: packed for kernels; PLAIN: not
    shape: tuple[int, ...]
    data: torch.Tensor

    @property
    def part(self) -> WeightPart:
        """The whole weight as a part of one."""
        return WeightPart(self.format, self.shape[0], self.data)


def write_packed(directory: Path, weights: Iterable[tuple[str, KeptWeight]]) -> None:
    """Write weights one after the other, each from a new cache line on."""
    index: dict[str, dict[str, Any]] = {}
    with (directory / DATA).open("wb") as file:
        for name, (kind, shape, data) in weights:
            file.write(bytes(-file.tell() % ALIGNMENT))
            place = {"offset": file.tell(), "bytes": data.nbytes}
            index[name] = {"format": kind, "shape": list(shape), **place}
            data.contiguous().flatten().view(torch.uint8).numpy().tofile(file)
    (directory / INDEX).write_text(json.dumps(index, indent=1))


def read_packed(directory: Path) -> dict[str, KeptWeight]:
    """Every weight by its name; nothing is read before it is used."""
    path = directory / DATA
    size = path.stat().st_size
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found: dict[str, KeptWeight] = {}
    for name, place in json.loads((directory / INDEX).read_text()).items():
        start, stop = place["offset"], place["offset"] + place["bytes"]
        if not 0 <= start <= stop <= size:
            raise ValueError(f"{path} ends before {name}, which should lie at {start} to {stop}")
        data, shape = mapped[start:stop], tuple(place["shape"])
        if place["format"] == PLAIN:
            data = data.view(torch.float32).view(shape)
        found[name] = KeptWeight(place["format"], shape, data)
    return found
