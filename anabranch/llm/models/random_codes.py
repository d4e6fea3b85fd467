"""Random codes for models without a checkpoint."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from anabranch.llm.models.expert_weights import (
    EXPERT_PARTS,
    by_output,
    join_experts,
    plain_experts,
    set_quantised_experts,
)
from anabranch.llm.models.quantised_linear import set_quantised
from anabranch.llm.models.quantised_model import EXPANDED, linear_layers
from anabranch.llm.models.quantised_weight import FP8, INT4, Codes, QuantisedWeight
from anabranch.llm.models.weight_scheme import WeightScheme


def quantise_randomly(model: nn.Module, scheme: WeightScheme) -> int:
    """Give the linear layers of a model random codes of a format, in place; how many."""
    count = 0
    for experts in plain_experts(model).values():
        _draw_experts(experts, scheme)
    for name, module in linear_layers(model).items():
        if _is_ignored(name, scheme) or name.rpartition(".")[2] in EXPANDED:
            continue
        weight = module.weight
        weights = draw_codes(scheme, *weight.shape, device=weight.device)
        set_quantised(
            module, QuantisedWeight(weights, dtype=weight.dtype, fp8_inputs=scheme.fp8_inputs)
        )
        count += 1
    return count


def _draw_experts(experts: Any, scheme: WeightScheme) -> None:
    """Random codes for experts, where they stay quantised."""
    joined: list[QuantisedWeight] = []
    for key, parts in EXPERT_PARTS.items():
        weight = getattr(experts, key)
        num_experts, rows, k = weight.shape
        sizes = rows // len(parts), k
        drawn = (
            by_output(draw_codes(scheme, *sizes, device=weight.device))
            for _ in range(num_experts * len(parts))
        )
        found = join_experts([QuantisedWeight(each, dtype=weight.dtype) for each in drawn])
        joined += [] if found is None else [found]
    if len(joined) == len(EXPERT_PARTS):
        set_quantised_experts(experts, *joined)


def draw_codes(scheme: WeightScheme, n: int, k: int, *, device: torch.device) -> Codes:
    """Random codes and scales of a format, with numbers of about 0.02."""
    if scheme.kind == FP8:
        codes = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        size = 0.02
    else:
        top = 16 if scheme.kind == INT4 else 256
        codes = torch.randint(top, (n, k), device=device, dtype=torch.uint8)
        size = 0.07 / top
    group_n, group_k = scheme.group_n, scheme.group_k or k
    scales = torch.rand(-(-n // group_n), -(-k // group_k), device=device)
    scales = size * (scales + 0.5)
    if scheme.kind == INT4:
        scales = scales.bfloat16()
    return Codes(scheme.kind, codes, scales, group_n=group_n, group_k=scheme.group_k)


def _is_ignored(name: str, scheme: WeightScheme) -> bool:
    """Whether a configuration leaves a linear layer as it is."""
    for pattern in scheme.ignored:
        if pattern.startswith("re:") and re.match(pattern[3:], name):
            return True
        if name == pattern or name.startswith(f"{pattern}."):
            return True
    return name.rpartition(".")[2] == "lm_head"
