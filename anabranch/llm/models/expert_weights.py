"""Quantised weights of all experts of a layer as one, in the place of a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from anabranch.llm.models.experts import is_plain
from anabranch.llm.models.quantised_weight import Codes, QuantisedWeight, join_quantised

# Weights of all experts, and what each expert has of them in a checkpoint
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def plain_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Experts by name whose quantised weights would be mixed by kernels."""
    modules = cast("list[tuple[str, nn.Module]]", list(cast("Any", model).named_modules()))
    return {
        name: module
        for name, module in modules
        if all(isinstance(getattr(module, key, None), nn.Parameter) for key in EXPERT_PARTS)
        and hasattr(module, "has_gate")
        and is_plain(module)
    }


def by_output(codes: Codes) -> Codes:
    """The same numbers with groups of one output, where outputs end within a group."""
    if not codes.codes.shape[0] % codes.group_n:
        return codes

    def spread(groups: torch.Tensor) -> torch.Tensor:
        return groups.repeat_interleave(codes.group_n, 0)[: codes.codes.shape[0]]

    zeros = None if codes.zeros is None else spread(codes.zeros)
    return replace(codes, scales=spread(codes.scales), zeros=zeros, group_n=1)


def join_experts(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """The outputs of all experts after each other; None where their formats are not one."""
    first = weights[0]
    one = len({weight.joins for weight in weights}) == 1
    return join_quantised(weights) if one and first.order is None and has_kernels(first) else None


def has_kernels(weight: QuantisedWeight) -> bool:
    """Whether experts in a format are mixed by kernels."""
    return weight.constants.has_product and weight.dtype.itemsize == 2


def set_quantised_experts(
    experts: nn.Module, gate_up: QuantisedWeight, down: QuantisedWeight
) -> None:
    """Let experts read quantised weights instead of their own."""
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
        delattr(experts, name)
        experts.add_module(name, weight)
