"""Plain checkpoints written with quantised linear layers, as compressed-tensors lays them out."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from anabranch.llm.models.checkpoint import config_file, save_weights
from anabranch.llm.models.model_config import empty_model, read_config, scheme_of
from anabranch.llm.models.quantised_model import Checkpoint, linear_layers

GROUPS = (128, 64, 32)  # columns that share a scale of int4: the first that divides all
LARGEST_E4M3 = 448.0
SHRINKS = tuple(1 - i / 40 for i in range(13))  # of a group's reach, tried as the end of the range
FILES = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "README*")  # beside the weights
Advance = Callable[[str, int, int], None]


def quantise_directory(source: Path, target: Path, kind: str, advance: Advance) -> str:
    """Write the model of `source` to `target` in "fp8" or "int4"; the format in words."""
    config = read_config(config_file(source))
    if scheme_of(config) is not None:
        raise ValueError(f"{source} is quantised already; take the weights it was made from")
    linears = linear_layers(empty_model(config, torch.float32))
    linears.pop("lm_head", None)
    group = next((x for x in GROUPS if not any(y.in_features % x for y in linears.values())), None)
    if kind == "int4" and group is None:
        raise ValueError(f"{source} has linear layers whose inputs are no multiple of {GROUPS[-1]}")
    target.mkdir(parents=True)
    with ExitStack() as stack:
        checkpoint = Checkpoint(source, stack)
        names = checkpoint.names()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for done, name in enumerate(names):
                advance(f"quantising to {kind}", done, len(names))
                layer, _, own = name.rpartition(".")
                tensor = checkpoint[name]
                if own != "weight" or layer not in linears:
                    yield name, tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
                    continue
                made = fp8_tensors(tensor) if kind == "fp8" else int4_tensors(tensor, group or 0)
                yield from ((f"{layer}.{key}", value) for key, value in made.items())

        save_weights(weights(), target)
    _write_config(source, target, kind, group)
    if kind == "fp8":
        return "e4m3, a scale for each output"
    return f"int4, a scale for each {group} columns of an output"


def fp8_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """e4m3 codes with a scale for each output."""
    numbers = weight.float()
    scales = numbers.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST_E4M3
    codes = (numbers / scales).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}


def int4_tensors(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """Codes from -8 to 7, eight a word; of the scales tried, each group has the best."""
    n, k = weight.shape
    numbers = weight.float().view(n, k // group, group)
    reach = torch.maximum(numbers.amax(2) / 7, -numbers.amin(2) / 8).clamp_min(1e-12)
    best, least = reach, torch.full_like(reach, torch.inf)
    for shrink in SHRINKS:
        scales = (reach * shrink).bfloat16().float()
        error = (_codes(numbers, scales) * scales[..., None] - numbers).square().sum(2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    codes = (_codes(numbers, best).view(n, k) + 8).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = (codes.view(n, -1, 8) << shifts).sum(2, dtype=torch.int32)
    shape = torch.tensor([n, k])
    return {"weight_packed": words, "weight_scale": best.bfloat16(), "weight_shape": shape}


def _codes(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (numbers / scales[..., None]).round().clamp(-8, 7)


def _write_config(source: Path, target: Path, kind: str, group: int | None) -> None:
    for pattern in FILES:
        for path in source.glob(pattern):
            if path.is_file() and "safetensors" not in path.name:
                shutil.copy(path, target / path.name)
    content: dict[str, Any] = json.loads((source / "config.json").read_text())
    content.pop("torch_dtype", None)
    content |= {"dtype": "bfloat16", "quantization_config": _quantization_config(kind, group)}
    (target / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _quantization_config(kind: str, group: int | None) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    inputs: dict[str, Any] | None = None
    if kind == "fp8":
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "group_size": None}
        inputs |= {"symmetric": True, "dynamic": True, "observer": None}
    else:
        weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**scheme, "output_activations": None}},
    }
