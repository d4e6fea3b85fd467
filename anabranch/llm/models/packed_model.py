"""Models of transformers on a CPU over packed weights."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from anabranch.llm.models.checkpoint import config_file
from anabranch.llm.models.cpu_layers import PACKED, PackedWeight, set_packed
from anabranch.llm.models.model_config import empty_model, read_config
from anabranch.llm.models.packed_file import PLAIN, KeptWeight, read_packed


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
