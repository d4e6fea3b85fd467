"""Weights written as safetensors, in files of a bounded size."""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 4 * 2**30


def save_weights(weights: Iterable[tuple[str, torch.Tensor]], directory: Path) -> None:
    """Safetensors in shards, of which no more than one is in memory at a time."""
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(weights), 1):
        file = f"model-{number:05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
        total += sum(weight.nbytes for weight in shard.values())
    files = sorted(set(places.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, weight in weights:
        if shard and held + weight.nbytes > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = weight
        held += weight.nbytes
    yield shard
