"""What a GGUF file says about its model, checked when opened; its tensors as torch has them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """An open GGUF file: its metadata by key, and its tensors, which are read when asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return self.required("general.architecture")

    def required(self, key: str) -> Any:
        """The value of `key`; a file without it is refused."""
        if key not in self.metadata:
            raise ValueError(f"{self.path} has no {key} in its metadata")
        return self.metadata[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(key, default)

    def shape(self, name: str, default: Any = None) -> Any:
        """The value of `ARCHITECTURE.name`; without a default it has to be there."""
        key = f"{self.architecture}.{name}"
        return self.required(key) if default is None else self.get(key, default)


def open_gguf(path: Path) -> GGUFModel:
    """Read the metadata of a GGUF file; what is damaged or cut short is a ValueError."""
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file: it begins with {magic!r}")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, struct.error, UnicodeError) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
    return GGUFModel(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def special_ids(model: GGUFModel) -> dict[str, Any]:
    """Token ids as transformers' configurations name them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{k}_token_id": model.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}


def tensor_values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """The numbers of a tensor, rows last, in float32 unless the file has them in 16 bits."""
    kind = tensor.tensor_type
    if kind == gguf.GGMLQuantizationType.BF16:
        raw = torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16)
        return raw.reshape(tuple(int(size) for size in reversed(tensor.shape)))
    if kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32):
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy(dequantize(tensor.data, kind))


def decimal(value: float) -> float:
    """1e-5 as it was before float32 made it 9.999999747e-06."""
    return float(f"{value:.6g}")
