"""The decoder layers of a model in one call, where its attention offers all of a step at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import AttentionInterface

from anabranch.kernels.cpu.decoder import (
    AttentionWeights,
    LayerRun,
    OutputWeights,
    PagedStep,
    RunLayer,
)


class StepFunction(Protocol):
    """An attention function that can say what a step reads before it is called."""

    def paged_step(
        self, attentions: Sequence[nn.Module], num_tokens: int, num_heads: int
    ) -> PagedStep | None:
        """The pages of these layers, or None where they have to be called one by one."""
        ...


class RunnableLayer(Protocol):
    """What a run needs to know of a layer."""

    weights: tuple[AttentionWeights, OutputWeights]
    num_heads: tuple[int, int]
    attention: Any
    arguments: dict[str, Any]


class DecoderRun:
    """Layers that follow each other, each reading what the one before it wrote.

    The first one runs all of them; the others, given what it returned, return that. Whether a
    model calls them so, with nothing in between, is seen from a pass in which each ran itself.
    """

    def __init__(self, layers: Sequence[RunnableLayer]) -> None:
        self._layers = layers
        self._run = LayerRun([_run_layer(layer) for layer in layers])
        self._before: torch.Tensor | None = None  # what the layer before returned
        self._followed = 0  # layers of this pass that read it
        self._is_chain = False
        self._result: torch.Tensor | None = None

    def passes(self, x: torch.Tensor, index: int) -> bool:
        """Whether a layer is given what the run returned, and has nothing left to do."""
        passed = index > 0 and x is self._result
        if passed and index + 1 == len(self._layers):
            self._result = None
        return passed

    def observe(self, x: torch.Tensor, y: torch.Tensor, index: int) -> None:
        """A layer made y of x by itself."""
        self._followed = self._followed + 1 if index and x is self._before else int(not index)
        last = index + 1 == len(self._layers)
        self._is_chain |= last and self._followed == len(self._layers)
        self._before = None if last else y

    def __call__(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        """The output of the last layer over x [1, num_tokens, hidden], where that can be had."""
        if not self._is_chain:
            return None
        attentions = [layer.attention for layer in self._layers]
        functions: Any = AttentionInterface()
        function = functions[attentions[0].config._attn_implementation]
        find = getattr(function, "paged_step", None)
        num_heads = self._layers[0].num_heads[0]
        step = None if find is None else find(attentions, x.shape[1], num_heads)
        if step is None:
            return None
        self._result = self._run(x[0], rotary[0], rotary[1], step)[None]
        return self._result


def can_run(layers: Sequence[RunnableLayer]) -> bool:
    """Whether one call can run all of these: layers of the same sizes, without a softcap."""
    sizes = {(x.num_heads, x.weights[0][4:], x.weights[1].inner) for x in layers}
    return len(layers) > 1 and len(sizes) == 1 and all("softcap" not in x.arguments for x in layers)


def _run_layer(layer: RunnableLayer) -> RunLayer:
    before, after = layer.weights
    scale = layer.arguments.get("scaling")
    window = cast("int | None", layer.arguments.get("sliding_window"))
    return RunLayer(before, after, before.head_dim**-0.5 if scale is None else scale, window)
