"""Tiny checkpoints in the quantised formats of others, written as their tools lay them out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Layer = dict[str, torch.Tensor]
Rng = np.random.Generator
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_words(codes: np.ndarray, bits: int = 4) -> torch.Tensor:
    """int32 words of the last dimension, lowest bits first."""
    per = 32 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // per), np.uint32)
    for place in range(per):
        words |= padded[..., place::per].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def int4_groups(rng: Rng, n: int, k: int, group: int) -> tuple[np.ndarray, ...]:
    """Codes [n, k], zeros and scales [n, groups], and the numbers they stand for."""
    codes = rng.integers(0, 16, (n, k))
    zeros = rng.integers(1, 16, (n, k // group))
    scales = (rng.random((n, k // group)) + 0.5).astype(np.float16)
    wide = [np.repeat(each, group, 1) for each in (zeros, scales.astype(np.float64))]
    return codes, zeros, scales, (codes - wide[0]) * wide[1]


def awq(rng: Rng, n: int, k: int, group: int) -> tuple[Layer, np.ndarray]:
    codes, zeros, scales, numbers = int4_groups(rng, n, k, group)

    def words(values: np.ndarray) -> torch.Tensor:  # [rows, n]
        grouped = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
        return pack_words(grouped.reshape(values.shape))

    layer = {"qweight": words(codes.T), "qzeros": words(zeros.T)}
    return layer | {"scales": torch.from_numpy(scales.T.copy())}, numbers


def gptq(
    rng: Rng, n: int, k: int, group: int, *, shuffled: bool = False, v2: bool = False
) -> tuple[Layer, np.ndarray]:
    codes, zeros, scales, numbers = int4_groups(rng, n, k, group)
    groups, order = np.arange(k) // group, np.arange(k)
    if shuffled:
        order = rng.permutation(k)
        codes, numbers, groups = codes[:, order], numbers[:, order], groups[order]
    layer = {
        "qweight": pack_words(codes).T.contiguous(),
        "qzeros": pack_words(zeros.T - (0 if v2 else 1)),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return layer, numbers


def packed(
    rng: Rng, n: int, k: int, group: int, *, bits: int = 4, zero_points: bool = False
) -> tuple[Layer, np.ndarray]:
    """compressed-tensors' pack-quantized."""
    top = 1 << bits
    codes = rng.integers(0, top, (n, k))
    zeros = np.full((n, k // group), top // 2)
    if zero_points:
        zeros = rng.integers(0, top, zeros.shape)
    scales = (rng.random(zeros.shape) + 0.5).astype(np.float32)
    wide = [np.repeat(each, group, 1) for each in (zeros, scales.astype(np.float64))]
    layer = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }
    numbers = (codes - wide[0]) * np.repeat(layer["weight_scale"].double().numpy(), group, 1)
    if zero_points:
        layer["weight_zero_point"] = pack_words(zeros.T, bits).T.contiguous()
    return layer, numbers


def fp8(rng: Rng, n: int, k: int, scale: str) -> tuple[Layer, np.ndarray]:
    """`scale` is tensor, channel or block."""
    weight = torch.from_numpy(rng.normal(size=(n, k))).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[scale]
    scales = torch.from_numpy(rng.random(shape) + 0.5).float()
    wide = scales.double()
    if scale == "block":
        wide = wide.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    name = "weight_scale_inv" if scale == "block" else "weight_scale"
    return {"weight": weight, name: scales}, (weight.double() * wide).numpy()


def int8(rng: Rng, n: int, k: int) -> tuple[Layer, np.ndarray]:
    weight = torch.from_numpy(rng.integers(-128, 128, (n, k)).astype(np.int8))
    scales = torch.from_numpy(rng.random((n, 1)) + 0.5).float()
    return {"weight": weight, "weight_scale": scales}, (weight.double() * scales.double()).numpy()


def compressed(layout: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
Write = Callable[[Rng, int, int], tuple[Layer, np.ndarray]]
# quantization_config of each format, and how a layer of it is written
FORMATS: dict[str, tuple[dict[str, Any], Write]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda rng, n, k: awq(rng, n, k, 32),
    ),
    "gptq": (GPTQ, lambda rng, n, k: gptq(rng, n, k, 32)),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda rng, n, k: gptq(rng, n, k, 32, v2=True),
    ),
    "gptq act order": (
        {**GPTQ, "desc_act": True},
        lambda rng, n, k: gptq(rng, n, k, 32, shuffled=True),
    ),
    "int4": (compressed("pack-quantized", INT4), lambda rng, n, k: packed(rng, n, k, 32)),
    "int4 zero points": (
        compressed("pack-quantized", {**INT4, "symmetric": False}),
        lambda rng, n, k: packed(rng, n, k, 32, zero_points=True),
    ),
    "int8 packed": (
        compressed("pack-quantized", {**INT8, "strategy": "group", "group_size": 32}),
        lambda rng, n, k: packed(rng, n, k, 32, bits=8),
    ),
    "int8": (compressed("int-quantized", INT8), int8),
    "fp8 channel": (
        compressed("float-quantized", {**FP8, "strategy": "channel"}, TOKENS),
        lambda rng, n, k: fp8(rng, n, k, "channel"),
    ),
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda rng, n, k: fp8(rng, n, k, "tensor"),
    ),
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda rng, n, k: fp8(rng, n, k, "block"),
    ),
}


def write_checkpoint(
    directory: Path, model: Any, name: str, *, size: float = 0.2, seed: int = 0
) -> Any:
    """Write a model with its decoder's linear layers quantised; it gets the numbers written.

    Numbers are about `size`: scales are set so.
    """
    config, write = FORMATS[name]
    rng = np.random.default_rng(seed)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    for prefix, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or prefix == "lm_head":
            continue
        layer, numbers = write(rng, *module.weight.shape)
        factor = 2.0 ** np.round(np.log2(size / numbers.std()))
        scale = next(key for key in layer if "scale" in key)
        layer[scale] = layer[scale] * factor
        if "fp8 tensor" in name:
            layer["input_scale"] = torch.ones(1)
        del tensors[f"{prefix}.weight"]
        tensors |= {f"{prefix}.{key}": value for key, value in layer.items()}
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(numbers * factor))
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    content = json.loads(model.config.to_json_string(use_diff=False))
    content["architectures"] = [type(model).__name__]
    content["quantization_config"] = config
    (directory / "config.json").write_text(json.dumps(content))
    return model
