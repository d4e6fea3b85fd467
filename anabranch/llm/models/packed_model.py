"""Models on a CPU whose weights stay in the formats of their GGUF file, and that file."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from anabranch.kernels.cpu.linear import WeightPart
from anabranch.llm.models.checkpoint import config_file
from anabranch.llm.models.cpu_layers import PACKED, PackedWeight, set_packed
from anabranch.llm.models.model_config import empty_model, read_config

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


def load_packed(
    directory: Path, *, attn_implementation: str, float_inputs: bool
) -> PreTrainedModel:
    """The model of a directory of packed weights, which are mapped."""
    config = read_config(config_file(directory))
    weights = read_packed(directory)
    model = empty_model(config, torch.float32, attn_implementation)
    packed = {name: kept for name, kept in weights.items() if _is_packed(model, name, kept)}
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in packed}
    tied = _tied_head(model, weights)
    for module in (*modules.values(), *tied):
        module.weight = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
    model.to_empty(device="cpu")
    model.initialize_weights()  # buffers such as rotary frequencies
    for name, module in modules.items():
        kept = packed[name]
        set_packed(module, PackedWeight([kept.part], kept.shape[1], float_inputs=float_inputs))
    for module in tied:
        set_packed(module, model.get_input_embeddings().packed)  # pyright: ignore[reportArgumentType]
    _set_plain(model, {name: kept for name, kept in weights.items() if name not in packed})
    model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _is_packed(model: nn.Module, name: str, kept: KeptWeight) -> bool:
    """Whether a weight is one of a module that reads it as it is."""
    parent, _, own = name.rpartition(".")
    return kept.format != PLAIN and own == "weight" and type(model.get_submodule(parent)) in PACKED


def _tied_head(model: PreTrainedModel, weights: dict[str, KeptWeight]) -> list[nn.Module]:
    """The output layer, where the file has no weight for it and the embeddings have one."""
    head: Any = model.get_output_embeddings()
    names: list[str] = [name for name, module in model.named_modules() if module is head]
    return [head] if names and f"{names[0]}.weight" not in weights else []


def _set_plain(model: nn.Module, weights: dict[str, KeptWeight]) -> None:
    """Copy all other weights, and make sure that none is left out."""
    wanted = {name: tensor for name, tensor in model.state_dict().items() if ".packed." not in name}
    if missing := sorted(wanted.keys() - weights.keys()):
        raise ValueError(f"the file lacks {len(missing)} weights, such as {missing[0]}")
    for name, kept in weights.items():
        values = kept.data
        if kept.format != PLAIN:
            values = PackedWeight([kept.part], kept.shape[1]).expanded()
        with torch.no_grad():
            wanted[name].copy_(values.view(kept.shape))
