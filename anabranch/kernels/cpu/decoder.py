"""A decoder layer before and after its attention, each in one call of a kernel, in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.kernels.cpu.native import native


class AttentionWeights(NamedTuple):
    """What comes before attention: a norm and joined projections."""

    norm: torch.Tensor  # [hidden]
    epsilon: float
    qkv: torch.Tensor  # the table of a packed weight, like o, gate_up and down
    bias: torch.Tensor | None
    num_outputs: int  # of q, k and v
    num_rotated: int  # heads of q and k
    head_dim: int


class OutputWeights(NamedTuple):
    """What comes after attention: the output projection and the feed-forward block."""

    o: torch.Tensor
    bias: torch.Tensor | None
    norm: torch.Tensor  # [hidden]
    epsilon: float
    gate_up: torch.Tensor
    down: torch.Tensor
    inner: int  # width of the feed-forward block


def layer_inputs(
    x: torch.Tensor,  # [rows, hidden], contiguous like all others
    cos: torch.Tensor,  # rows * head_dim numbers
    sin: torch.Tensor,
    weights: AttentionWeights,
) -> torch.Tensor:
    """q, k and v of every row, q and k rotated, [rows, heads, head_dim]."""
    rows = len(x)
    normed, joined = torch.empty_like(x), x.new_empty(rows, weights.num_outputs)
    native().layer_inputs(
        x.data_ptr(),
        weights.norm.data_ptr(),
        weights.qkv.data_ptr(),
        _address(weights.bias),
        cos.data_ptr(),
        sin.data_ptr(),
        normed.data_ptr(),
        joined.data_ptr(),
        rows,
        weights.num_rotated,
        weights.head_dim,
        weights.epsilon,
        torch.get_num_threads(),
    )
    return joined.view(rows, -1, weights.head_dim)


def layer_outputs(
    x: torch.Tensor,  # [rows, hidden], contiguous like all others
    attended: torch.Tensor,  # [rows, heads of q * head_dim]
    weights: OutputWeights,
) -> torch.Tensor:
    """The output of the layer, [rows, hidden]."""
    rows, hidden = x.shape
    y = torch.empty_like(x)
    room = x.new_empty(rows * (2 * hidden + 3 * weights.inner))
    native().layer_outputs(
        x.data_ptr(),
        attended.data_ptr(),
        weights.o.data_ptr(),
        _address(weights.bias),
        weights.norm.data_ptr(),
        weights.gate_up.data_ptr(),
        weights.down.data_ptr(),
        room.data_ptr(),
        y.data_ptr(),
        rows,
        weights.epsilon,
        torch.get_num_threads(),
    )
    return y


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
