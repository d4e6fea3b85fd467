"""mix_quantised_experts(): chosen experts whose weights are codes, widened in registers."""

from __future__ import annotations

from typing import Any

import torch

from anabranch.device import capability, has_overlap, shared_memory
from anabranch.kernels.layers.quantised_config import (
    CodeConstants,
    fit_quantised,
    select_code_experts,
)
from anabranch.llm.models.quantised_weight import QuantisedWeight
from anabranch.llm.models.routed_rows import add_up, mix_row, route_rows
from anabranch.shapes import Sizes, check_device, check_dtype


def mix_quantised_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: QuantisedWeight,
    down: QuantisedWeight,
) -> torch.Tensor:
    """mix_experts() over quantised weights [num_experts * 2 n, k] and [num_experts * k, n].

    x is float16 or bfloat16; gate before up for each expert.
    """
    sizes = Sizes()
    sizes.bind("k", gate_up.k, "gate_up")
    sizes.match("x", x, "num_tokens k")
    sizes.match("experts", experts, "num_tokens top_k")
    sizes.match("weights", weights, "num_tokens top_k")
    check_dtype("experts", experts, (torch.int32, torch.int64))
    check_dtype("x", x, (torch.float16, torch.bfloat16))
    if down.n % gate_up.k or down.n // gate_up.k * 2 * down.k != gate_up.n:
        raise ValueError(
            f"gate_up [{gate_up.n}, {gate_up.k}] and down [{down.n}, {down.k}] must be of experts "
            "[2 n, k] and [k, n]"
        )
    check_device("gate_up", gate_up.words, x.device)
    tensors = [each for held in (gate_up, down) for each in (held.words, held.scales, held.zeros)]
    settings = [
        each
        for held in (gate_up, down)
        for each in (held.constants.kind, held.constants.group_n, held.constants.group_k)
    ]
    given: Any = x, experts, weights, *tensors, *settings
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.mix_quantised_experts(*given)
    return _mix_quantised(*given)


def _mix_quantised(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    down_words: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    kind: str,
    group_n: int,
    group_k: int,
    down_kind: str,
    down_group_n: int,
    down_group_k: int,
) -> torch.Tensor:
    from anabranch.kernels.layers import quantised_experts as kernels
    from anabranch.kernels.layers.quantised_product import CodeArguments

    num_rows, num_experts = experts.numel(), len(down_words) // x.shape[1]
    n, packed = len(words) // num_experts // 2, capability(x.device) >= (8, 0)
    up_constants = CodeConstants(kind, group_n, group_k, packed=packed)
    down_constants = CodeConstants(down_kind, down_group_n, down_group_k, packed=packed)
    if not num_rows:
        return torch.zeros_like(x)
    if len(x) == 1:
        from anabranch.kernels.layers.expert_row import ExpertWeight

        up, down = (
            ExpertWeight(words, scales, zeros),
            ExpertWeight(down_words, down_scales, down_zeros),
        )
        return mix_row(x, experts, weights, n, (up, up_constants), (down, down_constants))
    x = x.contiguous()
    order, starts, _, weights, inner, outer = route_rows(x, experts, weights, num_experts, n)
    up_config, down_config = (
        fit_quantised(
            select_code_experts(constants, num_rows, num_experts),
            constants,
            shared_bytes=shared_memory(x.device)[0],
            hopper=has_overlap(x.device),
        )
        for constants in (up_constants, down_constants)
    )
    up, down = (
        CodeArguments(words, scales, zeros),
        CodeArguments(down_words, down_scales, down_zeros),
    )
    kernels.gate_quantised_experts(x, up, order, starts, inner, up_constants, up_config)
    given = inner, down, order, starts, weights, outer, down_constants, down_config
    kernels.project_quantised_experts(*given)
    return add_up(x, outer)


_mix_quantised_op = torch.library.custom_op(
    "anabranch::mix_quantised_experts", _mix_quantised, mutates_args=()
)


@_mix_quantised_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)
