"""mix_experts(): the feed-forward blocks of chosen experts, by four launches, or two for a token.

Nothing is read on the host, so a captured graph routes anew at each replay.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from anabranch.device import capability, num_sms, shared_memory
from anabranch.kernels.layers.expert_config import fit_experts, select_expert_tiles, select_experts
from anabranch.llm.models.code_experts import mix_quantised_experts
from anabranch.llm.models.quantised_weight import QuantisedWeight
from anabranch.llm.models.routed_rows import add_up, mix_row, route_rows
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype

NAME = "anabranch"  # among transformers' implementations of experts
OTHERS = "grouped_mm"  # for experts that are not plain


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of `down(silu(gate(x)) * up(x))` over the experts of each token.

    x        [num_tokens, k]
    experts  integer [num_tokens, top_k], each from 0 to num_experts
    weights  [num_tokens, top_k]
    gate_up  [num_experts, 2 n, k], gate before up
    down     [num_experts, k, n]
    """
    sizes = Sizes()
    sizes.match("down", down, "num_experts k n")
    sizes.bind("2n", 2 * down.shape[2], "down")
    sizes.match("gate_up", gate_up, "num_experts 2n k")
    sizes.match("x", x, "num_tokens k")
    sizes.match("experts", experts, "num_tokens top_k")
    sizes.match("weights", weights, "num_tokens top_k")
    check_dtype("experts", experts, (torch.int32, torch.int64))
    check_dtype("x", x, FLOATS)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_dtype(name, weight, (x.dtype,))
        check_device(name, weight, x.device)
        if not weight.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {weight.stride()}")
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.mix_experts(x, experts, weights, gate_up, down)
    return _mix(x, experts, weights, gate_up, down)


def _mix(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    (num_experts, _, n), num_rows = down.shape, experts.numel()
    if not num_rows:
        return torch.zeros_like(x)
    if len(x) == 1:
        from anabranch.kernels.layers.expert_row import ExpertWeight

        return mix_row(
            x, experts, weights, n, (ExpertWeight(gate_up), None), (ExpertWeight(down), None)
        )
    x = x.contiguous()
    order, starts, counters, weights, inner, outer = route_rows(x, experts, weights, num_experts, n)
    tiles = select_expert_tiles(num_rows, num_experts)
    if tiles is not None and _takes_boxes(x, gate_up, down):
        from anabranch.kernels.layers import hopper_experts as hopper

        given = tiles, num_sms(x.device)
        hopper.gate_experts(x, gate_up, order, starts, counters[:1], inner, *given)
        hopper.project_experts(inner, down, order, starts, counters[1:], weights, outer, *given)
    else:
        from anabranch.kernels.layers.expert_product import gate_experts, project_experts

        config = fit_experts(
            select_experts(num_rows, num_experts),
            itemsize=x.element_size(),
            shared_bytes=shared_memory(x.device)[0],
        )
        gate_experts(x, gate_up, order, starts, inner, config)
        project_experts(inner, down, order, starts, weights, outer, config)
    return add_up(x, outer)


def _takes_boxes(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the Hopper kernel can copy these: 16-bit rows that begin at multiples of 16 bytes."""
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, gate_up, down))
    even = down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0
    return capability(x.device)[0] == 9 and x.element_size() == 2 and aligned and even


def use_experts(model: PreTrainedModel) -> bool:
    """Let the experts of a model on a GPU be mixed here; whether it has any."""
    weights = [getattr(module, "gate_up_proj", None) for module in model.modules()]
    kinds = nn.Parameter | QuantisedWeight
    if not any(isinstance(weight, kinds) for weight in weights) or not is_on_gpu(model):
        return False
    cast("Any", ALL_EXPERTS_FUNCTIONS).register(NAME, _experts_forward)
    cast("Any", model).set_experts_implementation(NAME)
    return True


def is_on_gpu(model: nn.Module) -> bool:
    """Whether a model's weights are on a GPU."""
    return next(model.parameters()).is_cuda


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """As transformers calls it, for the experts of one layer."""
    given = hidden_states, top_k_index, top_k_weights
    if isinstance(module.gate_up_proj, QuantisedWeight):
        return mix_quantised_experts(*given, module.gate_up_proj, module.down_proj)
    if not is_plain(module):
        function: Any = cast("Any", ALL_EXPERTS_FUNCTIONS)[OTHERS]
        return function(module, *given)
    return mix_experts(*given, module.gate_up_proj, module.down_proj)


def is_plain(module: Any) -> bool:
    """Whether experts are two products with silu between them, in the order expected here."""
    gate = cast("Any", type(module))._apply_gate
    return bool(
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed)
        and isinstance(module.act_fn, type(cast("nn.Module", ACT2FN["silu"])))
        and gate.__module__ == ALL_EXPERTS_FUNCTIONS.__module__
    )


_mix_experts_op = torch.library.custom_op("anabranch::mix_experts", _mix, mutates_args=())


@_mix_experts_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)
