"""mix_experts(): the feed-forward blocks of chosen experts, by four launches, or two for a token.

Nothing is read on the host, so a captured graph routes anew at each replay.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from anabranch.device import capability, has_overlap, num_sms, shared_memory
from anabranch.kernels.layers.expert_config import fit_experts, select_expert_tiles, select_experts
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
    from anabranch.kernels.layers.expert_order import order_experts
    from anabranch.kernels.layers.expert_sum import sum_experts

    (num_tokens, top_k), (num_experts, k, n) = experts.shape, down.shape
    num_rows = num_tokens * top_k
    if not num_rows:
        return torch.zeros_like(x)
    if num_tokens == 1:
        return _mix_row(x, experts, weights, gate_up, down)
    x = x.contiguous()
    integers = partial(torch.empty, dtype=torch.int32, device=x.device)
    order, starts, counters = integers(num_rows), integers(num_experts + 1), integers(2)
    order_experts(experts.reshape(-1).contiguous(), order, starts, counters)
    inner, outer = x.new_empty(num_rows, n), x.new_empty(num_rows, k)
    weights = weights.reshape(-1).contiguous()
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
    y = torch.empty_like(x)
    sum_experts(outer, y)
    return y


def _takes_boxes(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the Hopper kernel can copy these: 16-bit rows that begin at multiples of 16 bytes."""
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, gate_up, down))
    even = down.shape[1] % 8 == 0 and down.shape[2] % 8 == 0
    return capability(x.device)[0] == 9 and x.element_size() == 2 and aligned and even


def _mix_row(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """For one token, whose experts each have one row."""
    from anabranch.kernels.layers.expert_row import gate_row, project_row

    y, inner = x.new_empty(x.shape), x.new_empty(experts.shape[1], down.shape[2])
    row, chosen, weights = (given.reshape(-1).contiguous() for given in (x, experts, weights))
    overlap = has_overlap(x.device)
    gate_row(row, gate_up, chosen, inner, overlap=overlap)
    project_row(inner, down, chosen, weights, y[0], overlap=overlap)
    return y


def use_experts(model: PreTrainedModel) -> bool:
    """Let the experts of a model on a GPU be mixed here; whether it has any."""
    weights = [getattr(module, "gate_up_proj", None) for module in model.modules()]
    if not any(isinstance(weight, nn.Parameter) for weight in weights) or not is_on_gpu(model):
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
    if not _is_plain(module):
        function: Any = cast("Any", ALL_EXPERTS_FUNCTIONS)[OTHERS]
        return function(module, hidden_states, top_k_index, top_k_weights)
    given = hidden_states, top_k_index, top_k_weights
    return mix_experts(*given, module.gate_up_proj, module.down_proj)


def _is_plain(module: Any) -> bool:
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
