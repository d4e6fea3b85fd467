"""Models without memory: every shape is there, no weight is."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def empty_model(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """A model on the meta device."""
    options: Any = {"dtype": dtype, "attn_implementation": attn_implementation}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), **options)


def num_weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """The memory of all weights, tied ones counted once."""
    return sum(weight.nbytes for weight in empty_model(config, dtype).parameters())
