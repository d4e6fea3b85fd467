"""GGUF files as transformers directories."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
)

from anabranch.kernels.cpu.linear import F32, WeightPart, pack
from anabranch.kernels.cpu.tiles import TILES, Bytes, pack_tiles
from anabranch.llm.models.checkpoint import config_file, save_weights
from anabranch.llm.models.fetched_models import WeightForm
from anabranch.llm.models.gguf_codes import code_tensors
from anabranch.llm.models.gguf_deepseek import ARCHITECTURE, deepseek_config, deepseek_weights
from anabranch.llm.models.gguf_llama import (
    halves_from_pairs,
    is_plain_llama,
    llama_config,
    llama_weights,
)
from anabranch.llm.models.gguf_metadata import GGUFModel, open_gguf, special_ids, tensor_values
from anabranch.llm.models.gguf_tokenizer import gguf_tokenizer, has_known_words
from anabranch.llm.models.model_config import default_dtype, empty_model, read_config
from anabranch.llm.models.packed_file import PLAIN, KeptWeight, write_packed
from anabranch.llm.models.quantised_model import linear_layers
from anabranch.llm.models.weight_scheme import GGUF

HEADS = ("attention.head_count", "attention.head_count_kv")
Key = tuple[tuple[int, ...], bytes]


def convert_gguf(path: Path, directory: Path, *, form: WeightForm = WeightForm.FLOATS) -> None:
    """Write configuration, weights, tokenizer and chat template of a GGUF file to `directory`."""
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
    if form is WeightForm.PACKED:
        write_packed(directory, _kept_weights(model, weights))
    elif form is WeightForm.CODES:
        save_weights(_coded_weights(model, weights, directory), directory)
        _name_scheme(config_file(directory))
    else:
        save_weights(weights, directory)
    _generation_config(model).save_pretrained(directory)


def _kept_weights(
    model: GGUFModel, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, KeptWeight]]:
    """Every weight in the format of the file, or as floats where it is no matrix of the file."""
    rows = GGUFRows(model)
    for name, weight in weights:
        found, shape = rows.find(weight), tuple(weight.shape)
        if found is None:
            yield name, KeptWeight(PLAIN, shape, weight.float())
        else:
            part = _pack(found, weight)
            yield name, KeptWeight(part.format, shape, part.data)


def _coded_weights(
    model: GGUFModel, weights: Iterable[tuple[str, torch.Tensor]], directory: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Codes of linear layers, and all other weights as they will be on a GPU."""
    config = read_config(config_file(directory))
    empty = empty_model(config, default_dtype(config, "cuda"))
    linears, own, rows = linear_layers(empty), empty.state_dict(), GGUFRows(model)
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        found = rows.find(weight) if layer in linears else None
        tensors = None if found is None else code_tensors(found.blocks(), found.name, found.k)
        if tensors is None:
            yield name, weight.to(own.get(name, weight).dtype)
        else:
            yield from ((f"{layer}.{key}", tensor) for key, tensor in tensors.items())


def _name_scheme(path: Path) -> None:
    """Say in a configuration that weights are codes."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"quantization_config": {"quant_method": GGUF}}))


def _generation_config(model: GGUFModel) -> GenerationConfig:
    ids = special_ids(model)
    ends = [ids["eos_token_id"], model.get("tokenizer.ggml.eot_token_id")]
    ids["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    return GenerationConfig(**ids)


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


class FoundRows(NamedTuple):
    """Rows of a matrix of a file, in the order of a converted weight."""

    tensor: gguf.ReaderTensor
    order: torch.Tensor  # int64 [n]

    @property
    def name(self) -> str:
        """Of the format."""
        return self.tensor.tensor_type.name

    @property
    def k(self) -> int:
        """Columns."""
        return int(self.tensor.shape[0])

    def blocks(self) -> Bytes:
        """As the file has them, uint8 [n, bytes]."""
        raw = np.ascontiguousarray(self.tensor.data).view(np.uint8)
        return raw.reshape(len(self.order), -1)[self.order.numpy()]


class GGUFRows:
    """The matrices of a file, so that converted weights can be kept as the file has them.

    A conversion renames tensors and moves rows. Instead of repeating its rules, a weight is looked
    for by its values: a tensor of the same shape that has them, in the file's order or in that of
    rotated halves. What is not found, having been computed from several tensors, stays floats.
    """

    def __init__(self, model: GGUFModel) -> None:
        counts = [model.shape(name, 1) for name in HEADS]  # lists where layers differ
        self._heads = sorted({count for count in counts if isinstance(count, int)})
        self._tensors: dict[Key, list[gguf.ReaderTensor]] = {}
        for tensor in model.tensors.values():
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if len(shape) == 2 and all(shape):
                self._tensors.setdefault((shape, _first_row(tensor)), []).append(tensor)

    def find(self, weight: torch.Tensor) -> FoundRows | None:
        """The rows of the file that are a weight [n, k]."""
        if weight.ndim != 2 or not weight.numel():
            return None
        key = (tuple(weight.shape), _key(weight[0]))
        for tensor in self._tensors.get(key, []):
            order = self._order(tensor, weight)
            if order is not None:
                return FoundRows(tensor, order)
        return None

    def _order(self, tensor: gguf.ReaderTensor, weight: torch.Tensor) -> torch.Tensor | None:
        values = tensor_values(tensor).to(weight.dtype)
        if torch.equal(values, weight):
            return torch.arange(len(weight))
        second = weight[min(1, len(weight) - 1)]  # an order moves it; all rows take longer
        for order in self._orders(len(weight)):
            if torch.equal(values[order[:2]][-1], second) and torch.equal(values[order], weight):
                return order
        return None

    def _orders(self, n: int) -> Iterator[torch.Tensor]:
        rows = torch.arange(n)
        for heads in self._heads:
            if n % (2 * heads) == 0:
                yield halves_from_pairs(rows[:, None], heads)[:, 0]


def _first_row(tensor: gguf.ReaderTensor) -> bytes:
    row: Any = tensor.data[:1]
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        return _key(torch.from_numpy(np.array(row)).view(torch.bfloat16).flatten())
    return _key(torch.from_numpy(np.array(dequantize(row, tensor.tensor_type))).flatten())


def _key(row: torch.Tensor) -> bytes:
    """In 16 bits, which some conversions round to."""
    return row.detach().half().numpy().tobytes()


def _pack(found: FoundRows, weight: torch.Tensor) -> WeightPart:
    """For kernels of a CPU, in the format of the file."""
    n, kind = len(weight), TILES.get(found.name)
    if kind is None or found.k % kind.span:
        return WeightPart(F32, n, pack(weight.float()))
    tiles = pack_tiles(found.blocks(), kind, found.k)
    return WeightPart(found.name, n, torch.from_numpy(tiles))
