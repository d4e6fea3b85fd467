"""What a decoder is that the kernels of a CPU run whole: Llama, Qwen2, Qwen3."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BIASED: dict[str, tuple[str, ...]] = {  # projections of each type
    "llama": (),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "qwen3": (),
}
# What config.json may say beside the fields below, if it says this; more is for transformers.
EXPECTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes by their names in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None

    def get_text_config(self) -> DecoderConfig:
        """Itself: there is no other part than the language model."""
        return self

    @property
    def norms_heads(self) -> bool:
        """Whether heads of queries and keys are normalised."""
        return self.model_type == "qwen3"

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its name in transformers."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        layer |= {f"self_attn.{name}.weight": (n, hidden) for name, n in outputs.items()}
        layer |= {f"self_attn.{name}.bias": (outputs[name],) for name in BIASED[self.model_type]}
        if self.norms_heads:
            layer |= {f"self_attn.{each}_norm.weight": (self.head_dim,) for each in "qk"}
        shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{index}.{name}": shape
            for index in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        shapes |= {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        shapes |= {"model.norm.weight": (hidden,)}
        return shapes | (
            {} if self.tie_word_embeddings else {"lm_head.weight": (self.vocab_size, hidden)}
        )

    def rotary_frequencies(self) -> torch.Tensor:
        """By how many radians a position turns each pair of columns, float32 [head_dim / 2]."""
        rope, dim = self.rope_parameters, self.head_dim
        turns = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if rope["rope_type"] == "linear":
            return turns / rope["factor"]
        if rope["rope_type"] == "llama3":
            return _llama3(turns, rope)
        return turns


def _llama3(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Slower by a factor where a turn is longer than the context of the training, or nearly."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * (frequencies / factor) + smooth * frequencies
    slowed = torch.where(wavelengths > context / low, frequencies / factor, between)
    return torch.where(wavelengths < context / high, frequencies, slowed)


def read_decoder_config(path: Path) -> DecoderConfig | None:
    """The configuration in a config.json; None for what transformers has to read."""
    try:
        given: Any = json.loads(path.read_text())
        rope: dict[str, Any] = given["rope_parameters"]
        fields = {name: given[name] for name in DecoderConfig.__dataclass_fields__}
    except (ValueError, KeyError, TypeError):
        return None
    usual = all(given.get(name, value) == value for name, value in EXPECTED.items())
    whole = rope.get("partial_rotary_factor", 1.0) == 1.0
    known = given["model_type"] in BIASED and rope.get("rope_type") in ROPE_TYPES
    windows = set(given.get("layer_types") or ()) - {"full_attention"}
    return DecoderConfig(**fields) if usual and whole and known and not windows else None
