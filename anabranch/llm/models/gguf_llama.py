"""Llama-architecture GGUF files as the configuration and weights of a transformers model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig

from anabranch.llm.models.gguf_metadata import GGUFModel, decimal, special_ids, tensor_values

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # by what llama.cpp divides the rotary frequencies


def is_plain_llama(model: GGUFModel) -> bool:
    """Whether every tensor is one of a Llama model without experts and biases."""
    return model.architecture == "llama" and all(
        name == ROPE_FACTORS or _transformers_name(name) for name in model.tensors
    )


def llama_config(model: GGUFModel) -> LlamaConfig:
    num_heads, hidden_size = model.shape("attention.head_count"), model.shape("embedding_length")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(model.required("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=model.shape("feed_forward_length"),
        num_hidden_layers=model.shape("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=model.shape("attention.head_count_kv", num_heads),
        head_dim=model.shape("attention.key_length", hidden_size // num_heads),
        max_position_embeddings=model.shape("context_length"),
        rms_norm_eps=decimal(model.shape("attention.layer_norm_rms_epsilon")),
        rope_parameters=_rope_parameters(model),
        tie_word_embeddings="output.weight" not in model.tensors,
        dtype=torch.float32,
        **special_ids(model),
    )


def llama_weights(model: GGUFModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight with its name in transformers, in float32 unless the file has it in 16 bits."""
    num_heads = model.shape("attention.head_count")
    num_kv_heads = model.shape("attention.head_count_kv", num_heads)
    for name, tensor in model.tensors.items():
        if name == ROPE_FACTORS:
            continue
        weight = tensor_values(tensor)
        if name.endswith("attn_q.weight"):
            weight = halves_from_pairs(weight, num_heads)
        elif name.endswith("attn_k.weight"):
            weight = halves_from_pairs(weight, num_kv_heads)
        yield _transformers_name(name), weight


def _transformers_name(name: str) -> str:
    if layer := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        below = LAYER_NAMES.get(layer[2])
        return f"model.layers.{layer[1]}.{below}" if below else ""
    return NAMES.get(name, "")


def halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, transformers row i with row i + dim / 2."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _rope_parameters(model: GGUFModel) -> dict[str, Any]:
    theta = float(model.shape("rope.freq_base", 10000.0))
    if ROPE_FACTORS in model.tensors:
        return _llama3_rope(model, theta)
    kind = model.shape("rope.scaling.type", "none")
    if kind == "linear":
        factor = float(model.shape("rope.scaling.factor"))
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "none":
        raise ValueError(f"{model.path} scales its rotary frequencies by {kind!r}: not supported")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(model: GGUFModel, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, of which the file holds the outcome: a factor for each frequency."""
    factors = tensor_values(model.tensors[ROPE_FACTORS]).double()
    low, high, context, factor = 1.0, 4.0, 8192, decimal(float(factors.max()))
    turns = (
        context * theta ** (-torch.arange(len(factors)).double() / len(factors)) / (2 * torch.pi)
    )
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ValueError(f"{model.path}: {ROPE_FACTORS} is not Llama 3's scaling: {factors}")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
