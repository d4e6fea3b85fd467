"""Decoder layers of transformers' models on a CPU that kernels run whole take their place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface

from anabranch.kernels.cpu.decoder import AttentionWeights, OutputWeights
from anabranch.llm.models.attention_functions import attention_function
from anabranch.llm.models.cpu_layers import CpuRMSNorm, PackedLinear, agrees, exact_products
from anabranch.llm.models.decoder import (
    DecoderLayer,
    DecoderRun,
    Rotary,
    can_run,
    join_head_norms,
)
from anabranch.llm.models.fused_projections import GatedMLP, JoinedLinears

RECORDER = "anabranch_recorder"
PASSED = {"scaling", "sliding_window", "softcap"}  # arguments of attention that a layer fixes,
IGNORED = {"dropout", "use_cache"}  # and others that say nothing at inference
TOLERANCE = 1e-4  # of the largest output: what float32 and another order of sums may differ by
NUM_TOKENS = 3  # of the trial


class FusedLayer(DecoderLayer):
    """A layer with the same weights, norms and attention function as the one it replaces."""

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__(*_weights(layer), arguments)
        self.layer = layer
        self._attention: Any = [layer.self_attn]  # in a list, so that it is registered once
        self._moved = False
        self._run: FollowedRun | None = None
        self._index = 0

    @property
    def attention(self) -> Any:
        return self._attention[0]

    @property
    def function(self) -> Callable[..., Any]:
        return attention_function(self.attention.config._attn_implementation)

    def join(self, run: FollowedRun, index: int) -> None:
        self._run, self._index = run, index

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the layer would give; unusual inputs go to the layer itself."""
        if self._run is not None and self._run.passes(hidden_states, self._index):
            return hidden_states
        rotary = cast("Rotary | None", kwargs.get("position_embeddings"))
        unusual = args or kwargs.get("past_key_values") is not None or torch.compiler.is_compiling()
        if rotary is None or unusual or not self._fits(hidden_states, *rotary):
            return self.layer(hidden_states, *args, **kwargs)
        y = self._run.first(hidden_states, rotary) if self._run and not self._index else None
        if y is None:
            y = self.rows(hidden_states[0], rotary, kwargs.get("attention_mask"))[None]
            if self._run is not None:
                self._run.observe(hidden_states, y, self._index)
        return y

    def _fits(self, x: torch.Tensor, *rotary: torch.Tensor) -> bool:
        if self._moved or len(x) != 1:
            return False
        numbers = x.shape[1] * self.weights[0].head_dim
        plain = (each.dtype == torch.float32 and each.is_contiguous() for each in (x, *rotary))
        return all(plain) and all(each.numel() == numbers for each in rotary)

    def _apply(self, fn: Any, recurse: bool = True) -> FusedLayer:
        """Moved or converted weights are no longer packed."""
        self._moved, self._run = True, None
        return super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]


class FollowedRun(DecoderRun):
    """Layers that a model of transformers calls one by one.

    The first one runs all of them; the others, given what it returned, return that. Whether a
    model calls them so, with nothing in between, is seen from a pass in which each ran itself.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__(layers)
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
        """Note that a layer computed y from x by itself."""
        self._followed = self._followed + 1 if index and x is self._before else int(not index)
        last = index + 1 == len(self._layers)
        self._is_chain |= last and self._followed == len(self._layers)
        self._before = None if last else y

    def first(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor | None:
        """What the first layer returns for all of them; None where layers run singly."""
        y = self(x[0], rotary) if self._is_chain else None
        if y is not None:
            self._result = y = y[None]
        return y


def _weights(layer: Any) -> tuple[tuple[int, int], AttentionWeights, OutputWeights]:
    """The numbers of query and kv heads, and the weights before and after attention."""
    attention, mlp = layer.self_attn, layer.mlp
    joined, dim = attention.joined_q_proj, attention.head_dim
    norms = layer.input_layernorm, layer.post_attention_layernorm
    linears = joined.linear, attention.o_proj, mlp.joined.linear, mlp.down_proj
    if not all(isinstance(each, CpuRMSNorm) for each in norms):
        raise TypeError("norms are not plain ones")
    if not isinstance(mlp, GatedMLP) or not all(isinstance(x, PackedLinear) for x in linears):
        raise TypeError("products are not over packed weights")
    if linears[-1].bias is not None or not isinstance(joined, JoinedLinears):
        raise TypeError("there is a bias that the kernel does not add")
    qkv, o, gate_up, down = linears
    q_size, k_size, _ = joined.sizes
    before = AttentionWeights(
        norms[0].weight,
        norms[0].epsilon,
        qkv.packed.table,
        qkv.bias,
        _head_norms(attention, q_size // dim, k_size // dim, norms[0].epsilon),
        qkv.out_features,
        (q_size + k_size) // dim,
        dim,
    )
    inner = down.in_features
    after = OutputWeights(
        o.packed.table,
        o.bias,
        norms[1].weight,
        norms[1].epsilon,
        gate_up.packed.table,
        down.packed.table,
        inner,
    )
    return (q_size // dim, k_size // dim), before, after


def _head_norms(
    attention: Any, num_heads: int, num_kv_heads: int, epsilon: float
) -> torch.Tensor | None:
    """The norms of every head of q and k, [heads, head_dim], where there are any."""
    found = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [norm for norm in found if isinstance(norm, CpuRMSNorm)]
    if len(norms) < 2:
        return None
    if {(norm.epsilon, len(norm.weight)) for norm in norms} != {(epsilon, attention.head_dim)}:
        raise TypeError("norms are not those of heads")
    return join_head_norms(norms, (num_heads, num_kv_heads))


@torch.inference_mode()
def fuse_decoder_layers(model: nn.Module) -> int:
    """Replace layers of lists of modules, in place; how many.

    A layer is replaced only if it gives the same numbers for a random input, whatever its class.
    """
    count = 0
    for parent in list(model.modules()):
        if not isinstance(parent, nn.ModuleList):
            continue
        for index, layer in enumerate(parent):
            fused = _fused(layer)
            if fused is not None:
                parent[index] = fused
                count += 1
        _join_run(parent)
    return count


def _join_run(layers: nn.ModuleList) -> None:
    """Let layers run in one call, if all were fused."""
    fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
    if len(fused) == len(layers) and can_run(fused):
        run = FollowedRun(fused)
        for index, layer in enumerate(fused):
            layer.join(run, index)


def _fused(layer: nn.Module) -> FusedLayer | None:
    try:
        _, before, _ = _weights(layer)
        x = torch.randn(1, NUM_TOKENS, len(before.norm))
        cos, sin = (torch.randn(1, NUM_TOKENS, before.head_dim) for _ in range(2))
        inputs: Any = {"position_embeddings": (cos, sin), "attention_mask": None}
        with _recorded(cast("Any", layer).self_attn.config) as calls, exact_products(layer):
            expected: Any = layer(x, **inputs)
            arguments = {name: calls[0][name] for name in calls[0].keys() - IGNORED}
            fused = FusedLayer(layer, arguments)
            actual = fused(x, **inputs)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return None  # it takes more than an input, or has other parts
    same = agrees(expected, actual, TOLERANCE)
    return fused if same and arguments.keys() <= PASSED else None


@contextmanager
def _recorded(config: Any) -> Generator[list[dict[str, Any]]]:
    """Stand in for the attention of a model, and note with which arguments it is called."""
    calls: list[dict[str, Any]] = []

    def record(
        module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any
    ) -> tuple[torch.Tensor, None]:
        del module
        calls.append({name: value for name, value in given.items() if value is not None})
        group = q.shape[1] // v.shape[1]
        return (q + (k + v).repeat_interleave(group, 1)).transpose(1, 2), None

    cast("Any", AttentionInterface).register(RECORDER, record)
    kind, config._attn_implementation = config._attn_implementation, RECORDER
    try:
        yield calls
    finally:
        config._attn_implementation = kind
