"""Tensors of one quantised linear layer, as checkpoints of each method lay them out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from anabranch.llm.models.quantised_weight import FP8, INT4, INT8, Codes
from anabranch.llm.models.weight_scheme import WeightScheme

Tensors = Mapping[str, torch.Tensor]  # of a layer, by the last part of their names
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each code of a word belongs to
NAMES = {  # that a quantised layer has, by the name that only it has
    "qweight": ("qweight", "scales"),
    "weight_packed": ("weight_packed", "weight_scale", "weight_shape"),
    "weight_scale_inv": ("weight", "weight_scale_inv"),
    "weight_scale": ("weight", "weight_scale"),
}


def is_quantised(names: set[str]) -> bool:
    """Whether a layer has tensors of a quantised weight."""
    return any(name in names for name in NAMES)


def read_codes(tensors: Tensors, scheme: WeightScheme, n: int, k: int) -> Codes:
    """The weight [n, k] of a layer; a ValueError says what is wrong with its tensors."""
    kind = next(name for name in NAMES if name in tensors)
    if missing := [name for name in NAMES[kind] if name not in tensors]:
        raise ValueError(f"{missing[0]} is missing beside {kind}")
    if kind == "qweight":
        codes = _awq(tensors, n, k) if scheme.method == "awq" else _gptq(tensors, scheme, n, k)
    elif kind == "weight_packed":
        codes = _packed(tensors, n, k)
    else:
        codes = _bytes(tensors, tensors[kind], scheme, n, k)
    if not codes.scales.float().isfinite().all():
        raise ValueError("a scale is not finite")
    return codes


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight codes of each int32, lowest first, in a new last dimension."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


def _groups(scales: torch.Tensor, n: int, k: int) -> int | None:
    """Columns of a group, by scales [groups, n]."""
    if scales.ndim != 2 or scales.shape[1] != n or not scales.shape[0] or k % scales.shape[0]:
        raise ValueError(f"scales must be [groups, {n}], got {list(scales.shape)} for {k} columns")
    return k // scales.shape[0] if scales.shape[0] > 1 else None


def _awq(tensors: Tensors, n: int, k: int) -> Codes:
    """Eight outputs a word, in an order of their own; zeros likewise."""
    qweight = _expect("qweight", tensors["qweight"], torch.int32, k, n // 8)
    scales = tensors["scales"]
    group_k = _groups(scales, n, k)
    order = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()
    codes = _nibbles(qweight)[..., order].view(k, n).T.contiguous()
    zeros = None
    if "qzeros" in tensors:
        stored = _expect("qzeros", tensors["qzeros"], torch.int32, scales.shape[0], n // 8)
        zeros = _nibbles(stored)[..., order].view(-1, n).T
    return Codes(INT4, codes, scales.T, zeros, group_k=group_k)


def _gptq(tensors: Tensors, scheme: WeightScheme, n: int, k: int) -> Codes:
    """Eight inputs a word; zeros eight outputs a word, and one less in the first format."""
    qweight = _expect("qweight", tensors["qweight"], torch.int32, k // 8, n)
    scales = tensors["scales"]
    group_k = _groups(scales, n, k)
    codes = _nibbles(qweight).transpose(1, 2).reshape(k, n).T
    zeros = None
    if "qzeros" in tensors:
        stored = _expect("qzeros", tensors["qzeros"], torch.int32, scales.shape[0], n // 8)
        zeros = _nibbles(stored).view(-1, n).T
        zeros = zeros + 1 if scheme.zeros_less_one else zeros
    order = _order(tensors.get("g_idx"), group_k, k)
    if order is not None:
        codes = codes[:, order]
    return Codes(INT4, codes.contiguous(), scales.T, zeros, order, group_k=group_k)


def _order(groups: torch.Tensor | None, group_k: int | None, k: int) -> torch.Tensor | None:
    """Columns sorted by their group, or None where they are."""
    if groups is None or group_k is None:
        return None
    plain = torch.arange(k, device=groups.device, dtype=groups.dtype) // group_k
    if groups.shape == plain.shape and torch.equal(groups, plain):
        return None
    order = torch.argsort(groups.long(), stable=True)
    if groups.shape != plain.shape or not torch.equal(groups[order], plain):
        raise ValueError(f"g_idx must give each of {k // group_k} groups {group_k} of {k} columns")
    return order


def _packed(tensors: Tensors, n: int, k: int) -> Codes:
    """compressed-tensors: as many inputs a word as fit; codes and zeros are offset.

    Layers of GGUF files are laid out likewise, with zeros that are floats.
    """
    shape = [int(size) for size in tensors["weight_shape"]]
    if shape != [n, k]:
        raise ValueError(f"weight_shape must be {[n, k]}, got {shape}")
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    bits = 4 if packed.shape == (n, -(-k // 8)) else 8
    _expect("weight_packed", packed, torch.int32, n, -(-k // (32 // bits)))
    groups = scales.shape[1] if scales.ndim == 2 and len(scales) == n else 0
    if not groups or k % groups:
        raise ValueError(f"weight_scale must be [{n}, groups], got {list(scales.shape)}")
    group_k = k // groups if groups > 1 else None
    codes = _unpacked(packed, bits)[:, :k]
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.is_floating_point():
        zeros = _expect("weight_zero_point", zeros, torch.float16, n, groups)
        if not zeros.isfinite().all():
            raise ValueError("a zero is not finite")
    elif zeros is not None and zeros.dtype == torch.int8:  # a zero a byte, without the offset
        zeros = _expect("weight_zero_point", zeros, torch.int8, n, groups)
        zeros = zeros.to(torch.int16) + 2 ** (bits - 1)
    elif zeros is not None:
        words = _expect("weight_zero_point", zeros, torch.int32, -(-n // (32 // bits)), groups)
        zeros = _unpacked(words.T.contiguous(), bits)[:, :n].T
    order = _order(tensors.get("weight_g_idx"), group_k, k)
    codes = codes.contiguous() if order is None else codes[:, order]
    if bits == 4:
        return Codes(INT4, codes, scales, zeros, order, group_k=group_k)
    if zeros is not None and not zeros.is_floating_point():
        zeros = (zeros.to(torch.int16) - 128).to(torch.int8)
    return Codes(INT8, codes ^ 0x80, scales, zeros, order, group_k=group_k)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of each int32 after each other, lowest bits first."""
    if bits == 4:
        return _nibbles(words).flatten(1)
    return words.contiguous().view(torch.uint8)


def _bytes(tensors: Tensors, scales: torch.Tensor, scheme: WeightScheme, n: int, k: int) -> Codes:
    """A code a byte, with a scale for all, each output, each block or each group of columns."""
    weight = tensors["weight"]
    kinds = {torch.float8_e4m3fn: FP8, torch.int8: INT8}
    if weight.dtype not in kinds or weight.shape != (n, k):
        raise ValueError(
            f"weight must be float8_e4m3fn or int8 {[n, k]}, got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and not zeros.any():
        zeros = None
    codes, kind = weight.contiguous().view(torch.uint8), kinds[weight.dtype]
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1)
        zeros = None if zeros is None else zeros.reshape(1, 1).expand(n, 1)
    elif scales.ndim == 1:
        scales = scales[:, None]
        zeros = None if zeros is None else zeros.reshape(-1, 1)
    if scales.shape == (n, 1):
        return Codes(kind, codes, scales, zeros)
    return Codes(kind, codes, scales, zeros, group_n=scheme.group_n, group_k=scheme.group_k)
