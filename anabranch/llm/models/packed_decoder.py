"""A decoder over packed weights on a CPU that needs no transformers: it starts fast and small."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from anabranch.kernels.cpu.decoder import AttentionWeights, OutputWeights
from anabranch.kernels.cpu.linear import packed_linear
from anabranch.llm.models.attention_functions import attention_function
from anabranch.llm.models.cpu_layers import CpuRMSNorm, PackedWeight
from anabranch.llm.models.decoder import (
    DecoderLayer,
    DecoderRun,
    Rotary,
    can_run,
    join_head_norms,
)
from anabranch.llm.models.decoder_config import DecoderConfig, read_decoder_config
from anabranch.llm.models.packed_file import PLAIN, KeptWeight, read_packed

QKV = ("q_proj", "k_proj", "v_proj")
GENERATION = "generation_config.json"


class DecoderOutput(NamedTuple):
    """What a model returns."""

    logits: torch.Tensor  # [1, num_rows, vocab]


class GenerationDefaults(NamedTuple):
    """What generation_config.json says."""

    options: dict[str, Any]

    @property
    def eos_token_id(self) -> int | list[int] | None:
        return self.options.get("eos_token_id")

    def to_diff_dict(self) -> dict[str, Any]:
        """What differs from defaults, as transformers calls it."""
        return self.options


class DecoderWeights:
    """The weights of a decoder by name, made into what modules hold."""

    def __init__(self, kept: Mapping[str, KeptWeight], *, float_inputs: bool) -> None:
        self._kept = kept
        self._float_inputs = float_inputs

    def packed(self, *names: str) -> PackedWeight:
        """Matrices of one input, their outputs after each other."""
        parts = [self._kept[f"{name}.weight"].part for name in names]
        k = self._kept[f"{names[0]}.weight"].shape[1]
        return PackedWeight(parts, k, float_inputs=self._float_inputs)

    def norm(self, name: str, epsilon: float) -> CpuRMSNorm:
        return CpuRMSNorm(nn.Parameter(self._vector(f"{name}.weight"), False), epsilon)

    def bias(self, *names: str) -> torch.Tensor | None:
        """Of matrices whose outputs follow each other."""
        if f"{names[0]}.bias" not in self._kept:
            return None
        return torch.cat([self._vector(f"{name}.bias") for name in names])

    def _vector(self, name: str) -> torch.Tensor:
        return self._kept[name].data.clone()  # of a mapped file


class PackedDecoderLayer(DecoderLayer):
    """A layer with its weights."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, index: int, implementation: str
    ) -> None:
        name, epsilon = f"model.layers.{index}", config.rms_norm_eps
        norms = [
            weights.norm(f"{name}.{each}_layernorm", epsilon)
            for each in ("input", "post_attention")
        ]
        projections = [f"{name}.self_attn.{each}" for each in QKV]
        qkv, bias = weights.packed(*projections), weights.bias(*projections)
        o, down = (weights.packed(f"{name}.{x}") for x in ("self_attn.o_proj", "mlp.down_proj"))
        gate_up = weights.packed(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
        heads, dim = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
        head_norms = None
        if config.norms_heads:
            names = [f"{name}.self_attn.{each}_norm" for each in "qk"]
            head_norms = join_head_norms([weights.norm(x, epsilon) for x in names], heads)
        before = AttentionWeights(
            norms[0].weight, epsilon, qkv.table, bias, head_norms, qkv.n, sum(heads), dim
        )
        after = OutputWeights(
            o.table, None, norms[1].weight, epsilon, gate_up.table, down.table, down.k
        )
        super().__init__(heads, before, after, {"scaling": dim**-0.5})
        self._function = attention_function(implementation)
        self.held = nn.ModuleList([*norms, qkv, o, gate_up, down])  # whose memory kernels read

    @property
    def attention(self) -> nn.Module:
        return self

    @property
    def function(self) -> Callable[..., Any]:
        return self._function


class PackedDecoder(nn.Module):
    """Embeddings, layers, a norm and an output layer; called as the engine calls any model."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        generation: GenerationDefaults,
        implementation: str,
    ) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation
        self.embed_tokens = weights.packed("model.embed_tokens")
        self.layers = nn.ModuleList(
            PackedDecoderLayer(config, weights, index, implementation)
            for index in range(config.num_hidden_layers)
        )
        self.norm = weights.norm("model.norm", config.rms_norm_eps)
        is_tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if is_tied else weights.packed("lm_head")
        self._frequencies = config.rotary_frequencies()
        self._stack = [layer for layer in self.layers if isinstance(layer, PackedDecoderLayer)]
        self._run = DecoderRun(self._stack) if can_run(self._stack) else None

    def forward(
        self,
        input_ids: torch.Tensor,  # int64 [1, num_tokens]
        position_ids: torch.Tensor | None = None,  # the same; from 0 on unless given
        logits_to_keep: torch.Tensor | int = 0,  # rows, or how many of the last; 0 keeps all
        **_: object,  # what other models are told
    ) -> DecoderOutput:
        ids = input_ids[0]
        positions = torch.arange(len(ids)) if position_ids is None else position_ids[0]
        x = self._hidden(self.embed_tokens.rows(ids), self._rotary(positions))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head = self.lm_head
        return DecoderOutput(packed_linear(self.norm(x[kept]), head.table, head.n, None)[None])

    def _hidden(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        y = None if self._run is None else self._run(x, rotary)
        if y is not None:
            return y
        for layer in self._stack:
            x = layer.rows(x, rotary)
        return x

    def _rotary(self, positions: torch.Tensor) -> Rotary:
        angles = positions.float()[:, None] * self._frequencies
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        raise NotImplementedError(
            f"{type(self).__name__} is not moved or converted: load it with a dtype or a device"
        )


def load_decoder(
    directory: Path, *, implementation: str, float_inputs: bool
) -> PackedDecoder | None:
    """The decoder of a directory of packed weights, mapped; None where transformers is needed."""
    config = read_decoder_config(directory / "config.json")
    if config is None:
        return None
    kept = read_packed(directory)
    found = {name: kept[name].shape for name in kept}
    plain = {name for name in kept if kept[name].format == PLAIN}
    if found != (shapes := config.weight_shapes()):
        return None
    if plain != {name for name, shape in shapes.items() if len(shape) == 1}:
        return None
    path = directory / GENERATION
    generation = GenerationDefaults(json.loads(path.read_text()) if path.is_file() else {})
    weights = DecoderWeights(kept, float_inputs=float_inputs)
    return PackedDecoder(config, weights, generation, implementation)
