"""Models with random weights, by a configuration alone."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from anabranch.llm.models.model_config import check_fits, empty_model, read_config, scheme_of
from anabranch.llm.models.quantised_model import plain_config
from anabranch.llm.models.random_codes import quantise_randomly

CONFIGS = Path(__file__).parent / "configs"


def dummy_config(name: str) -> PreTrainedConfig:
    """A configuration by the path of its file or directory, or by a name in `configs/`."""
    shipped = sorted(path.stem for path in CONFIGS.glob("*.json"))
    if name in shipped:
        return read_config(CONFIGS / f"{name}.json")
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"dummy:{name}: neither a config file nor one of {shipped}")
    return read_config(path)


def dummy_model(
    config: PreTrainedConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """A model with random weights as transformers initialises them, the same for a seed.

    Memory is allocated on the device once; transformers' initialisation then writes every weight
    there, and the buffers that no checkpoint holds, such as rotary frequencies. Where the
    configuration has a format of quantised weights, GPUs get random codes of it.
    """
    device, scheme = torch.device(device), scheme_of(config)
    model = empty_model(plain_config(config), dtype, attn_implementation)
    check_fits(sum(weight.nbytes for weight in model.parameters()), device)
    model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.initialize_weights()
        if scheme is not None and device.type == "cuda":
            quantise_randomly(model, scheme)
    return model
