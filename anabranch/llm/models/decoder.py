"""Decoder layers on a CPU: one by two calls of a kernel, or all of a step in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from anabranch.kernels.cpu.decoder import (
    AttentionWeights,
    LayerRun,
    OutputWeights,
    RunLayer,
    layer_inputs,
    layer_outputs,
)
from anabranch.llm.models.cpu_layers import CpuRMSNorm

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, num_tokens * head_dim numbers


class DecoderLayer(nn.Module):
    """A layer over packed weights, whose attention is a function of transformers' kind."""

    def __init__(
        self,
        num_heads: tuple[int, int],  # of queries, of keys and values
        before: AttentionWeights,
        after: OutputWeights,
        arguments: dict[str, Any],  # of attention: scaling, sliding_window, softcap
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weights = before, after
        self.arguments = arguments

    @property
    def attention(self) -> nn.Module:
        """What the attention function is called for, and has the cache."""
        raise NotImplementedError

    @property
    def function(self) -> Callable[..., Any]:
        """The attention function."""
        raise NotImplementedError

    def rows(
        self, x: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer's output for x [num_tokens, hidden], contiguous."""
        before, after = self.weights
        q_heads, kv_heads = self.num_heads
        heads = layer_inputs(x, *rotary, before).transpose(0, 1)[None]
        q, k, v = torch.split(heads, [q_heads, kv_heads, kv_heads], 1)
        out: Any = self.function(self.attention, q, k, v, mask, dropout=0.0, **self.arguments)[0]
        attended = cast("torch.Tensor", out.reshape(len(x), -1).contiguous())
        return layer_outputs(x, attended, after)


def join_head_norms(norms: Sequence[CpuRMSNorm], counts: tuple[int, int]) -> torch.Tensor:
    """Norms of the heads of q and of those of k, [heads, head_dim]."""
    weights = zip(norms, counts, strict=True)
    return torch.cat([norm.weight.detach().repeat(count, 1) for norm, count in weights])


class DecoderRun:
    """Layers that follow each other, each reading what the one before it wrote."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        self._layers = layers
        self._run = LayerRun([_run_layer(layer) for layer in layers])

    def __call__(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        """The last layer's output for x [num_tokens, hidden]; None where layers run singly."""
        find = getattr(self._layers[0].function, "paged_step", None)
        if find is None:
            return None
        attentions = [layer.attention for layer in self._layers]
        step = find(attentions, len(x), self._layers[0].num_heads[0])
        return None if step is None else self._run(x, *rotary, step)


def can_run(layers: Sequence[DecoderLayer]) -> bool:
    """Whether one call can run all of these: layers of the same sizes, without a softcap."""
    sizes = {(x.num_heads, x.weights[0][5:], x.weights[1].inner) for x in layers}
    return len(layers) > 1 and len(sizes) == 1 and all("softcap" not in x.arguments for x in layers)


def _run_layer(layer: DecoderLayer) -> RunLayer:
    before, after = layer.weights
    scale = layer.arguments.get("scaling")
    window = cast("int | None", layer.arguments.get("sliding_window"))
    return RunLayer(before, after, before.head_dim**-0.5 if scale is None else scale, window)
