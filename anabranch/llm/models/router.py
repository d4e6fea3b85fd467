"""route_experts(): which experts a token goes to and with which weights, by one launch.

Nothing is read on the host, so a captured graph routes anew at each replay.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from anabranch.device import has_overlap, shared_memory
from anabranch.kernels.layers.route_config import fit_route, select_route
from anabranch.llm.models.experts import is_on_gpu
from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype

Routed = tuple[torch.Tensor, torch.Tensor]  # experts and weights
GREEDY, LIMITED = "greedy", "group_limited_greedy"  # DeepSeek-V2's ways to choose
NUM_COUNTERS = 128  # blocks of tokens that need no counters of their own


def route_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    sigmoid: bool = False,
    normalised: bool = False,
    scale: float = 1.0,
) -> Routed:
    """The `top_k` experts of each token, best first, and their weights.

    x         [num_tokens, k]
    weight    [num_experts, k]
    bias      [num_experts], added to the scores for the choice only
    counters  int32, zeros and left as zeros; those of one call at a time

    The scores are the softmax of `x @ weight.T` in float32, or its sigmoid. Only experts of the
    `top_groups` best of `num_groups` groups are chosen: by the best score in a group, and with
    `sigmoid` by the sum of the two best. Of equal scores the first wins. `normalised` weights add
    up to one before they are multiplied by `scale`.

    Experts are int32 and weights float32, both [num_tokens, top_k].
    """
    _check(x, weight, bias, counters)
    _check_groups(weight.shape[0], top_k, num_groups, top_groups)
    if top_groups == num_groups:
        num_groups = top_groups = 1
    given = top_k, num_groups, top_groups, sigmoid, normalised, scale
    if torch.compiler.is_compiling():
        return torch.ops.anabranch.route_experts(x, weight, bias, counters, *given)
    return _route(x, weight, bias, counters, *given)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> None:
    sizes = Sizes()
    sizes.match("weight", weight, "num_experts k")
    sizes.match("x", x, "num_tokens k")
    check_dtype("x", x, FLOATS)
    check_dtype("weight", weight, FLOATS)
    check_device("weight", weight, x.device)
    if weight.stride(1) != 1:
        raise ValueError(f"weight must have contiguous rows, got strides {weight.stride()}")
    if bias is not None:
        sizes.match("bias", bias, "num_experts")
        check_dtype("bias", bias, FLOATS)
        check_device("bias", bias, x.device)
    if counters is not None:
        sizes.match("counters", counters, "num_blocks")
        check_dtype("counters", counters, (torch.int32,))
        check_device("counters", counters, x.device)


def _check_groups(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be 1 to {num_experts}, got {top_k}")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups must divide {num_experts} experts, got {num_groups}")
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"top_groups must be 1 to {num_groups}, got {top_groups}")


def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    top_groups: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
) -> Routed:
    from anabranch.kernels.layers.route_experts import num_places
    from anabranch.kernels.layers.route_experts import route_experts as launch

    experts = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)
    if not len(x):
        return experts, weights
    config = fit_route(
        select_route(len(x), num_places(weight.shape[0], num_groups), x.shape[1]),
        itemsize=max(x.element_size(), weight.element_size()),
        shared_bytes=shared_memory(x.device)[0],
        hopper=has_overlap(x.device),
    )
    launch(
        x.contiguous(),
        weight,
        None if bias is None else bias.contiguous(),
        counters,
        experts,
        weights,
        config,
        num_groups=num_groups,
        top_groups=top_groups,
        sigmoid=sigmoid,
        normalised=normalised,
        scale=scale,
    )
    return experts, weights


class SoftmaxRouter(DeepseekV2TopkRouter):
    """DeepSeek-V2's router by one launch."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        limited = cast("Any", self).topk_method == LIMITED
        return _route_by(self, hidden_states, None, limited=limited)


class SigmoidRouter(DeepseekV3TopkRouter):
    """DeepSeek-V3's router by one launch."""

    def forward(self, hidden_states: torch.Tensor) -> Any:
        own: Any = self
        options: Any = {"sigmoid": True, "normalised": own.norm_topk_prob}
        return _route_by(self, hidden_states, own.e_score_correction_bias, **options)


def _route_by(
    router: Any, x: torch.Tensor, bias: torch.Tensor | None, *, limited: bool = True, **options: Any
) -> tuple[None, torch.Tensor, torch.Tensor]:
    """What transformers' routers return, without logits; experts are int32."""
    experts, weights = route_experts(
        x.reshape(-1, router.hidden_dim),
        router.weight,
        bias,
        router.counters,
        top_k=router.top_k,
        num_groups=router.num_group if limited else 1,
        top_groups=router.topk_group if limited else 1,
        scale=float(router.routed_scaling_factor),
        **options,
    )
    return None, weights, experts


ROUTERS: dict[type[nn.Module], type[nn.Module]] = {
    DeepseekV2TopkRouter: SoftmaxRouter,
    DeepseekV3TopkRouter: SigmoidRouter,
}


def use_router(model: nn.Module) -> int:
    """Let the routers of DeepSeek models on a GPU route here, in place; how many."""
    routers = [module for module in model.modules() if _is_known(module)]
    if not routers or not is_on_gpu(model):
        return 0
    for router in routers:
        device = next(router.parameters()).device
        router.__class__ = ROUTERS[type(router)]
        zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
        router.register_buffer("counters", zeros, persistent=False)
    return len(routers)


def _is_known(module: nn.Module) -> bool:
    return type(module) in ROUTERS and getattr(module, "topk_method", GREEDY) in (GREEDY, LIMITED)


_route_experts_op = torch.library.custom_op(
    "anabranch::route_experts", _route, mutates_args=()
)  # counters are written, and left as they were


@_route_experts_op.register_fake  # pyright: ignore[reportUnknownMemberType]
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counters: torch.Tensor | None,
    top_k: int,
    *_: object,
) -> Routed:
    del weight, bias, counters
    shape = x.shape[0], top_k
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)
