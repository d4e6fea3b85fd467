"""GGUF files written again with their matrices in Q8_0 or Q4_K; all else is copied."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from anabranch.llm.models.gguf_metadata import open_gguf, tensor_values

BLOCK, PARTS, SIZE = 256, 8, 32  # numbers of a block of Q4_K, its parts, numbers of a part
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the range of a part, tried
ROWS = 1 << 14  # blocks that are encoded at a time
HEADS = ("token_embd.weight", "output.weight")  # kept in 8 bits: an error there meets every token
Advance = Callable[[str, int, int], None]
Kind = gguf.GGMLQuantizationType
FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "q4_k": gguf.LlamaFileType.MOSTLY_Q4_K_S}


def quantise_gguf(source: Path, target: Path, kind: str, advance: Advance) -> str:
    """Write `source` to `target` in "q8_0" or "q4_k"; how many tensors have which format."""
    model = open_gguf(source)
    reader: Any = gguf.GGUFReader(source)
    writer: Any = gguf.GGUFWriter(target, model.architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[kind])
    kinds = {name: _kind(tensor, kind) for name, tensor in model.tensors.items()}
    for name, tensor in model.tensors.items():
        shape = [int(size) for size in reversed(tensor.shape)]
        block, width = gguf.GGML_QUANT_SIZES[kinds[name]]
        num_bytes = int(np.prod(shape)) // block * width
        stored = [*shape[:-1], shape[-1] // block * width]
        plain = kinds[name] in (Kind.F32, Kind.F16)
        dtype = tensor.data.dtype if plain else np.dtype(np.uint8)
        writer.add_tensor_info(name, shape if plain else stored, dtype, num_bytes, kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, (name, tensor) in enumerate(model.tensors.items()):
        advance(f"quantising to {kind}", done, len(kinds))
        same = kinds[name] == tensor.tensor_type
        writer.write_tensor_data(np.array(tensor.data) if same else _encode(tensor, kinds[name]))
    writer.close()
    counts = {each.name: sum(x == each for x in kinds.values()) for each in set(kinds.values())}
    return ", ".join(f"{count} tensors in {name}" for name, count in sorted(counts.items()))


def _kind(tensor: gguf.ReaderTensor, wanted: str) -> Kind:
    """The format a tensor is written in: matrices in the one wanted, where their rows allow it."""
    kind, columns = tensor.tensor_type, int(tensor.shape[0])
    if len(tensor.shape) < 2 or columns % SIZE or not tensor.name.endswith(".weight"):
        return kind
    if wanted == "q8_0" or columns % BLOCK or tensor.name in HEADS:
        return kind if _bits(kind) < _bits(Kind.Q8_0) else Kind.Q8_0
    return kind if _bits(kind) < _bits(Kind.Q4_K) else Kind.Q4_K


def _bits(kind: Kind) -> float:
    block, width = gguf.GGML_QUANT_SIZES[kind]
    return 8 * width / block


def _encode(tensor: gguf.ReaderTensor, kind: Kind) -> np.ndarray[Any, Any]:
    numbers = tensor_values(tensor).float()
    if kind == Kind.Q8_0:
        return quantize(numbers.numpy(), kind)
    blocks = numbers.reshape(-1, PARTS, SIZE)
    starts = range(0, len(blocks), ROWS)
    encoded = torch.cat([encode_q4_k(blocks[start : start + ROWS]) for start in starts])
    return encoded.view(*numbers.shape[:-1], -1).numpy()


def encode_q4_k(numbers: torch.Tensor) -> torch.Tensor:
    """Blocks of 8 parts of 32 numbers as uint8 [blocks, 144].

    A number is `d * scale * code - e * least`: codes have 4 bits, scales and leasts of a part 6,
    and d and e of the block are float16.
    """
    scales, leasts = _fit(numbers)
    d = (scales.amax(1, keepdim=True) / 63).half()
    e = (leasts.amax(1, keepdim=True) / 63).half()
    scales = _divide(scales, d.float()).round().clamp(0, 63)
    leasts = _divide(leasts, e.float()).round().clamp(0, 63)
    shifted = numbers + (e.float() * leasts)[..., None]
    codes = _divide(shifted, (d.float() * scales)[..., None]).round().clamp(0, 15).to(torch.uint8)
    pairs = codes.view(-1, PARTS // 2, 2, SIZE)
    halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    ends = torch.cat([d, e], 1).view(torch.uint8)
    return torch.cat([ends, _pack_scales(scales, leasts), halves], 1)


def _fit(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and least of each part: of the ranges tried, after a fit to the codes, the best."""
    low = numbers.amin(2).clamp_max(0)
    reach = numbers.amax(2) - low
    best, best_least, least_error = reach / 15, -low, torch.full_like(reach, torch.inf)
    for shrink in SHRINKS:
        codes = _divide(numbers - low[..., None], (reach * shrink / 15)[..., None])
        codes = codes.round().clamp(0, 15)
        scales, leasts = _solve(numbers, codes)
        error = (scales[..., None] * codes - leasts[..., None] - numbers).square().sum(2)
        better = (error < least_error) & (scales > 0)
        best, best_least = (
            torch.where(better, new, old) for new, old in ((scales, best), (leasts, best_least))
        )
        least_error = torch.where(better, error, least_error)
    return best, best_least


def _solve(numbers: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the least, not below 0, that fit codes to numbers with the least squares."""
    mean, middle = numbers.mean(2), codes.mean(2)
    spread = (codes - middle[..., None]).square().sum(2)
    both = ((codes - middle[..., None]) * (numbers - mean[..., None])).sum(2)
    scales = _divide(both, spread)
    leasts = scales * middle - mean
    through_zero = _divide((codes * numbers).sum(2), codes.square().sum(2))
    return torch.where(leasts < 0, through_zero, scales), leasts.clamp_min(0)


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def _pack_scales(scales: torch.Tensor, leasts: torch.Tensor) -> torch.Tensor:
    """Eight scales and eight leasts of 6 bits in 12 bytes: the high bits of the last four of each
    lie above the first four.
    """
    s, m = scales.to(torch.uint8), leasts.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    return torch.cat([first, second, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1)
