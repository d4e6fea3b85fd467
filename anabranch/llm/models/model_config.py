"""The configuration of a model: read, and refused where it is not a decoder-only model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from anabranch.llm.models.weight_scheme import WeightScheme, read_scheme


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
