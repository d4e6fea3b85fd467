"""The configuration of a model: read, checked, and made into a model without memory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from anabranch.llm.models.attention_functions import known_to_transformers
from anabranch.llm.models.weight_scheme import WeightScheme, read_scheme

GIB = 2**30


def read_config(path: Path) -> PreTrainedConfig:
    """The configuration in a config.json, of a decoder-only model that transformers has itself."""
    try:
        content: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no configuration, but a {type(content).__name__}")
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        code = " and comes with Python code, which is not run" if "auto_map" in content else ""
        raise ValueError(
            f"{path}: model_type {model_type!r} is not in transformers "
            f"{transformers.__version__}{code}"
        )
    quantised = cast("dict[str, Any]", content).get("quantization_config")
    if quantised is not None:
        read_scheme(quantised, path)  # refuses what cannot be loaded
    load: Any = AutoConfig.from_pretrained
    try:
        config = load(path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise ValueError(f"{path} is no valid configuration: {error}") from error
    _check_decoder_only(config, path)
    return config


def default_dtype(config: PreTrainedConfig, device: torch.device | str) -> torch.dtype:
    """float32 on a CPU; elsewhere what the configuration says if it has 16 bits, or bfloat16."""
    if torch.device(device).type == "cpu":
        return torch.float32
    dtype = config.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16


def scheme_of(config: PreTrainedConfig) -> WeightScheme | None:
    """How the weights of a configuration are quantised, if they are."""
    content: Any = getattr(config, "quantization_config", None)
    return None if content is None else read_scheme(content, config.name_or_path or "the model")


def _check_decoder_only(config: PreTrainedConfig, path: Path) -> None:
    architectures = config.architectures or []
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    generates = not architectures or any(
        name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in architectures
    )
    if config.is_encoder_decoder or not known or not generates:
        raise ValueError(
            f"{path} describes {architectures or config.model_type}: "
            "anabranch runs decoder-only models"
        )


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """A model on the meta device."""
    options: Any = {
        "dtype": dtype,
        "attn_implementation": known_to_transformers(attn_implementation),
    }
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), **options)


def num_weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """The memory of all weights, tied ones counted once."""
    return sum(weight.nbytes for weight in empty_model(config, dtype).parameters())


def check_fits(num_bytes: int, device: torch.device | str) -> None:
    """Raise a ValueError where a GPU has fewer than `num_bytes` free; other devices pass."""
    device = torch.device(device)
    if device.type != "cuda":
        return
    free = free_bytes(device)
    if num_bytes > free:
        raise ValueError(
            f"model needs {num_bytes / GIB:.1f} GiB, the GPU has {free / GIB:.1f} GiB free"
        )


def free_bytes(device: torch.device) -> int:
    """What the driver has free on a GPU, and what torch holds there without using it."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
