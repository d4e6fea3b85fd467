"""Transformers directories: configuration, safetensors and tokenizer, read and written."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from anabranch.llm.models.attention_functions import known_to_transformers
from anabranch.llm.models.model_config import (
    check_fits,
    default_dtype,
    num_weight_bytes,
    read_config,
    scheme_of,
)
from anabranch.llm.models.quantised_model import load_quantised

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SHARD_BYTES = 4 * 2**30


def load_weights(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    attn_implementation: str,
    cut: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """The model of a directory, on its device; every weight has to be in its safetensors.

    `cut` is called before the model is moved, so that only what it leaves must fit on the device.
    """
    config = read_config(config_file(directory))
    _check_safetensors(directory)
    dtype = dtype or default_dtype(config, device)
    if (scheme := scheme_of(config)) is not None:
        return load_quantised(
            directory,
            config,
            scheme,
            device=device,
            dtype=dtype,
            attn_implementation=attn_implementation,
            cut=cut,
        )
    if torch.device(device).type == "cuda" and cut is None:
        check_fits(num_weight_bytes(config, dtype), device)
    options: Any = {
        "dtype": dtype,
        "attn_implementation": known_to_transformers(attn_implementation),
        "use_safetensors": True,
        "trust_remote_code": False,
        "local_files_only": True,
        "output_loading_info": True,
    }
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with _without_progress_bars():
            model, report = load(directory, **options)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"the weights in {directory} cannot be read: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{directory} lacks {len(missing)} weights, such as {missing[0]}")
    if cut is not None:
        cut(model)
        check_fits(sum(weight.nbytes for weight in model.parameters()), device)
    return model.to(device)


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory, or None where there is none."""
    if not any((directory / name).is_file() for name in TOKENIZERS):
        return None
    load: Any = AutoTokenizer.from_pretrained
    try:
        return load(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error


def config_file(directory: Path) -> Path:
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no config.json: it is no transformers directory")
    return path


def _check_safetensors(directory: Path) -> None:
    if any((directory / name).is_file() for name in WEIGHTS):
        return
    if pickles := sorted(path.name for kind in PICKLES for path in directory.glob(kind)):
        raise ValueError(
            f"{directory} has its weights in {pickles[0]}, which can run code when it is read: "
            "only safetensors are loaded"
        )
    raise FileNotFoundError(f"{directory} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}")


@contextmanager
def _without_progress_bars() -> Generator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


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
