"""How the weights of a checkpoint are quantised, by its `quantization_config`.

Read before any weight is, by transformers' own classes where they need no other package; what
cannot be run is refused with its name and those that can.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from transformers.utils.quantization_config import AwqConfig, FineGrainedFP8Config, GPTQConfig

from anabranch.llm.models.quantised_weight import FP8, INT4, INT8

SUPPORTED = (
    "fp8 (per tensor, per channel, in blocks), compressed-tensors (fp8, int8, int4), awq and gptq "
    "(int4), and GGUF files"
)
GGUF = "gguf"  # of directories made from GGUF files; compressed-tensors' names and words
# Formats of compressed-tensors, and kinds of codes that each holds
COMPRESSED = {
    "float-quantized": (FP8,),
    "int-quantized": (INT8,),
    "naive-quantized": (FP8, INT8),
    "pack-quantized": (INT4, INT8),
}


class UnsupportedWeights(ValueError):
    """A format that cannot be loaded, named beside those that can."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """A method, and how most weights are quantised: others say so by their tensors."""

    method: str  # "fp8", "compressed-tensors", "awq", "gptq" or "gguf"
    kind: str  # of codes
    group_n: int = 1  # outputs and columns that share a scale
    group_k: int | None = None  # all columns
    fp8_inputs: bool = False  # the checkpoint is meant for inputs of e4m3
    zeros_less_one: bool = False  # gptq's first format stores zeros so
    ignored: tuple[str, ...] = ()  # modules left as they are, by name


def read_scheme(content: object, where: object) -> WeightScheme:
    """From a `quantization_config`; `where` names the file in errors."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: quantization_config must be an object, got {content!r:.80}")
    settings = dict(cast("Mapping[str, Any]", content))
    method = settings.get("quant_method")
    readers = {
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fp8,
        "compressed-tensors": _read_compressed,
        "awq": _read_awq,
        "gptq": _read_gptq,
        GGUF: _read_gguf,
    }
    if method not in readers:
        raise _refusal(where, f"in the format {method!r}")
    try:
        return readers[method](settings, where)
    except UnsupportedWeights:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{where}: quantization_config of {method} is not valid: {error}"
        ) from error


def _refusal(where: object, what: str) -> UnsupportedWeights:
    return UnsupportedWeights(
        f"{where}: the weights are quantised {what}; supported are {SUPPORTED}"
    )


def _read_fp8(settings: dict[str, Any], where: object) -> WeightScheme:
    blocks = settings.get("weight_block_size")
    if settings["quant_method"] == "fp8":
        read: Any = FineGrainedFP8Config.from_dict(settings)
        if read.scale_fmt != "float":
            raise _refusal(where, f"in fp8 with scales of {read.scale_fmt}")
    ignored = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()
    if blocks is None:
        return WeightScheme("fp8", FP8, fp8_inputs=True, ignored=tuple(ignored))
    group_n, group_k = blocks
    size = int(group_n), int(group_k)
    return WeightScheme("fp8", FP8, *size, fp8_inputs=True, ignored=tuple(ignored))


def _read_awq(settings: dict[str, Any], where: object) -> WeightScheme:
    read: Any = AwqConfig.from_dict(dict(settings))
    if read.bits != 4 or str(getattr(read.format, "value", read.format)) != "gemm":
        raise _refusal(where, f"by awq with {read.bits} bits in the layout {read.format!s}")
    return WeightScheme("awq", INT4, group_k=_group(read.group_size))


def _read_gptq(settings: dict[str, Any], where: object) -> WeightScheme:
    read: Any = GPTQConfig.from_dict(dict(settings))
    if read.bits != 4 or read.format not in ("gptq", "gptq_v2"):
        raise _refusal(where, f"by gptq with {read.bits} bits in the layout {read.format}")
    less_one = read.format == "gptq"
    return WeightScheme("gptq", INT4, group_k=_group(read.group_size), zeros_less_one=less_one)


def _read_gguf(settings: dict[str, Any], where: object) -> WeightScheme:
    """Each layer has the bits and the groups of its tensors."""
    del settings, where
    return WeightScheme(GGUF, INT4, group_k=32)


def _read_compressed(settings: dict[str, Any], where: object) -> WeightScheme:
    """compressed-tensors' own classes need a package that nothing else here does."""
    for name in ("sparsity_config", "transform_config"):
        held = settings.get(name)
        if held and held.get("format") != "dense" and (held.get("config_groups") or name[0] == "s"):
            raise _refusal(where, f"by compressed-tensors with a {name}")
    groups = list(settings["config_groups"].values())
    schemes = [_read_group(group, settings.get("format"), where) for group in groups]
    if not schemes:
        raise ValueError("it has no config_groups")
    if len({(scheme.kind, scheme.group_n, scheme.group_k) for scheme in schemes}) > 1:
        raise _refusal(where, f"by compressed-tensors in {len(schemes)} ways")
    first = schemes[0]
    inputs = all(scheme.fp8_inputs for scheme in schemes)
    ignored = tuple(settings.get("ignore") or ())
    return WeightScheme(
        first.method, first.kind, first.group_n, first.group_k, fp8_inputs=inputs, ignored=ignored
    )


def _read_group(group: dict[str, Any], default: str | None, where: object) -> WeightScheme:
    weights, layout = group["weights"], group.get("format") or default
    bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
    kind = {(8, True): FP8, (8, False): INT8, (4, False): INT4}.get((bits, is_float))
    if kind is None or kind not in COMPRESSED.get(str(layout), ()):
        number = f"{weights.get('type')}{bits}"
        raise _refusal(where, f"by compressed-tensors as {number} in the layout {layout!r}")
    strategy = weights.get("strategy") or "tensor"
    inputs = group.get("input_activations")
    fp8_inputs = kind == FP8 and bool(inputs) and inputs.get("type") == "float"
    if strategy in ("tensor", "channel"):
        return WeightScheme("compressed-tensors", kind, fp8_inputs=fp8_inputs)
    if strategy == "group":
        size = _group(weights["group_size"])
        return WeightScheme("compressed-tensors", kind, group_k=size)
    if strategy == "block":
        group_n, group_k = weights["block_structure"]
        size = int(group_n), int(group_k)
        return WeightScheme("compressed-tensors", kind, *size, fp8_inputs=fp8_inputs)
    raise _refusal(where, f"by compressed-tensors with the strategy {strategy!r}")


def _group(size: Any) -> int | None:
    """Columns of a group; None: all of them."""
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise ValueError(f"group_size must be a positive integer or -1, got {size!r}")
    return None if size == -1 else size
