"""GGUF files as transformers directories, converted once into the user's cache."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
)

from anabranch.llm.models.gguf_deepseek import ARCHITECTURE, deepseek_config, deepseek_weights
from anabranch.llm.models.gguf_llama import is_plain_llama, llama_config, llama_weights
from anabranch.llm.models.gguf_metadata import GGUFModel, open_gguf
from anabranch.llm.models.gguf_rows import GGUFRows
from anabranch.llm.models.gguf_tokenizer import gguf_tokenizer, has_known_words
from anabranch.llm.models.packed_file import PLAIN, KeptWeight, write_packed
from anabranch.llm.models.store import CONVERSION, Progress, make_once
from anabranch.llm.models.weight_shards import save_weights


def gguf_directory(path: Path, *, packed: bool = False, progress: Progress | None = None) -> Path:
    """The transformers directory made from a GGUF file, from the cache where it was made before.

    Its weights are safetensors of floats; or `packed` for a CPU, in the formats of the file.
    """
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def convert(directory: Path) -> None:
        convert_gguf(path, directory, packed=packed, progress=progress)

    return make_once(f"{path.stem}-{key}{'-packed' if packed else ''}", convert)


def convert_gguf(
    path: Path, directory: Path, *, packed: bool = False, progress: Progress | None = None
) -> None:
    """Write configuration, weights, tokenizer and chat template of a GGUF file to `directory`."""
    if progress:
        progress(f"{'packing' if packed else 'converting'} {path.name}")
    model = open_gguf(path)
    if is_plain_llama(model):
        llama_config(model).save_pretrained(directory)
        weights = llama_weights(model)
        gguf_tokenizer(model).save_pretrained(directory)
    elif model.architecture == ARCHITECTURE:
        deepseek_config(model).save_pretrained(directory)
        weights = deepseek_weights(model)
        gguf_tokenizer(model).save_pretrained(directory)
    else:
        weights = _convert_by_transformers(model, directory)
    if packed:
        write_packed(directory, _kept_weights(model, weights))
    else:
        save_weights(weights, directory)
    _generation_config(model).save_pretrained(directory)


def _kept_weights(
    model: GGUFModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, KeptWeight]]:
    """Every weight in the format of the file, or as floats where it is no matrix of the file."""
    rows = GGUFRows(model)
    for name, weight in weights:
        part, shape = rows.find(weight), tuple(weight.shape)
        plain = KeptWeight(PLAIN, shape, weight.float() if part is None else weight)
        yield name, plain if part is None else KeptWeight(part.format, shape, part.data)


def _generation_config(model: GGUFModel) -> GenerationConfig:
    ends = [model.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return GenerationConfig(
        bos_token_id=model.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=list(dict.fromkeys(end for end in ends if end is not None)) or None,
        pad_token_id=model.get("tokenizer.ggml.padding_token_id"),
    )


def _convert_by_transformers(
    model: GGUFModel, directory: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    if find_spec("accelerate") is None:
        raise ValueError(
            f"{model.path} has the architecture {model.architecture!r}, which transformers "
            "converts with the help of accelerate: pip install accelerate"
        )
    load: Any = AutoModelForCausalLM.from_pretrained
    source, options = model.path.parent, {"gguf_file": model.path.name, "local_files_only": True}
    plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    converted, report = load(source, **plain, **options, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{model.path} lacks {len(missing)} weights, such as {missing[0]}")
    converted.config.save_pretrained(directory)
    load_tokenizer: Any = AutoTokenizer.from_pretrained
    known = has_known_words(model)
    tokenizer = gguf_tokenizer(model) if known else load_tokenizer(source, **options)
    tokenizer.save_pretrained(directory)
    return _own_weights(converted)


def _own_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and kept buffers, tied ones once."""
    seen: set[int] = set()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in seen:
            seen.add(weight.data_ptr())
            yield name, weight
