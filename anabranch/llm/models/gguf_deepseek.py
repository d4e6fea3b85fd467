"""GGUF files of the architecture deepseek2 as configuration and weights of DeepSeek-V2 or V3."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gguf
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from anabranch.llm.models.gguf_metadata import GGUFModel, decimal, special_ids, tensor_values

ARCHITECTURE = "deepseek2"
SIGMOID = gguf.ExpertGatingFuncType.SIGMOID  # how V3 scores experts; V2 has a softmax
ROPE_FACTORS = "rope_freqs.weight"  # what llama.cpp computes itself
ATTENTION = {
    "attn_norm": "input_layernorm.weight",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
}
QUERY = {"attn_q": "self_attn.q_proj.weight"}
LOW_RANK_QUERY = {
    "attn_q_a": "self_attn.q_a_proj.weight",
    "attn_q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn_q_b": "self_attn.q_b_proj.weight",
}
DENSE = {f"ffn_{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
SHARED = {
    f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
}
EXPERTS = {"ffn_gate_inp": "mlp.gate.weight", "ffn_down_exps": "mlp.experts.down_proj"}


class WeightSource(NamedTuple):
    """Tensors of a file that make one weight of transformers."""

    target: str
    tensors: tuple[str, ...]


def deepseek_config(model: GGUFModel) -> PreTrainedConfig:
    """The configuration of a DeepSeek model: V3 where experts are scored by a sigmoid."""
    is_v3 = _is_v3(model)
    family = "V3" if is_v3 else "V2"
    heads, rotary = model.shape("attention.head_count"), model.shape("rope.dimension_count")
    groups = model.shape("expert_group_count", 1)
    options: dict[str, Any] = {
        "architectures": [f"Deepseek{family}ForCausalLM"],
        "vocab_size": len(model.required("tokenizer.ggml.tokens")),
        "hidden_size": model.shape("embedding_length"),
        "intermediate_size": model.shape("feed_forward_length"),
        "moe_intermediate_size": model.shape("expert_feed_forward_length"),
        "num_hidden_layers": model.shape("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": model.shape("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": model.shape("attention.kv_lora_rank"),
        "qk_nope_head_dim": _head_dim(model, "key_length") - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": _head_dim(model, "value_length"),
        "first_k_dense_replace": model.shape("leading_dense_block_count", 0),
        "n_routed_experts": model.shape("expert_count"),
        "n_shared_experts": model.shape("expert_shared_count"),
        "num_experts_per_tok": model.shape("expert_used_count"),
        "n_group": groups,
        "topk_group": model.shape("expert_group_used_count", groups),
        "norm_topk_prob": _normalises(model),
        "routed_scaling_factor": decimal(model.shape("expert_weights_scale", 1.0)),
        "max_position_embeddings": model.shape("context_length"),
        "rms_norm_eps": decimal(model.shape("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope_parameters(model),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "dtype": torch.bfloat16,
        **special_ids(model),
    }
    if is_v3:
        options["num_nextn_predict_layers"] = 0
        return DeepseekV3Config(**options)
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return DeepseekV2Config(**options, topk_method=method)


def deepseek_weights(model: GGUFModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight with its name in transformers, quantised ones in float16.

    Rotary columns are neighbours in both, so no row is moved.
    """
    sources = list(_sources(model))
    wanted = {name for source in sources for name in source.tensors}
    if missing := sorted(wanted - model.tensors.keys()):
        raise ValueError(f"{model.path} lacks {len(missing)} tensors: {', '.join(missing[:8])}")
    if unknown := sorted(model.tensors.keys() - wanted - {ROPE_FACTORS}):
        raise ValueError(f"{model.path} has unknown tensors: {', '.join(unknown[:8])}")
    for target, names in sources:
        weights = [_weight(model.tensors[name]) for name in names]
        if target.endswith("kv_b_proj.weight") and len(weights) == 2:
            yield target, _join_up_projection(*weights)
        else:  # gate and up of every expert
            yield target, weights[0] if len(weights) == 1 else torch.cat(weights, 1)


def _weight(tensor: gguf.ReaderTensor) -> torch.Tensor:
    values = tensor_values(tensor)
    is_quantised = tensor.tensor_type != gguf.GGMLQuantizationType.F32
    return values.half() if is_quantised and values.dtype == torch.float32 else values


def _join_up_projection(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows of each head, keys before values, of k [heads, rank, dim] and v [heads, dim, rank]."""
    both = torch.cat([k.to(v.dtype).transpose(1, 2), v], 1)
    return both.flatten(0, 1).contiguous()


def _sources(model: GGUFModel) -> Iterator[WeightSource]:
    yield WeightSource("model.embed_tokens.weight", ("token_embd.weight",))
    yield WeightSource("model.norm.weight", ("output_norm.weight",))
    if "output.weight" in model.tensors:
        yield WeightSource("lm_head.weight", ("output.weight",))
    num_dense = model.shape("leading_dense_block_count", 0)
    for layer in range(model.shape("block_count")):
        names = _attention_names(model, layer)
        names |= {(key,): name for key, name in DENSE.items()} if layer < num_dense else {}
        names |= _expert_names(model, layer) if layer >= num_dense else {}
        for keys, name in names.items():
            tensors = tuple(f"blk.{layer}.{key if '.' in key else f'{key}.weight'}" for key in keys)
            yield WeightSource(f"model.layers.{layer}.{name}", tensors)


def _attention_names(model: GGUFModel, layer: int) -> dict[tuple[str, ...], str]:
    query = LOW_RANK_QUERY if model.shape("attention.q_lora_rank", 0) else QUERY
    names: dict[tuple[str, ...], str] = {(key,): x for key, x in (ATTENTION | query).items()}
    is_split = f"blk.{layer}.attn_k_b.weight" in model.tensors
    whole = f"blk.{layer}.attn_kv_b.weight" in model.tensors or not is_split
    names[("attn_kv_b",) if whole else ("attn_k_b", "attn_v_b")] = "self_attn.kv_b_proj.weight"
    return names


def _expert_names(model: GGUFModel, layer: int) -> dict[tuple[str, ...], str]:
    names: dict[tuple[str, ...], str] = {(key,): x for key, x in (EXPERTS | SHARED).items()}
    joined = f"blk.{layer}.ffn_gate_up_exps.weight" in model.tensors
    parts = ("ffn_gate_up_exps",) if joined else ("ffn_gate_exps", "ffn_up_exps")
    names[parts] = "mlp.experts.gate_up_proj"
    if _is_v3(model):
        names[("exp_probs_b.bias",)] = "mlp.gate.e_score_correction_bias"
    return names


def _is_v3(model: GGUFModel) -> bool:
    return model.shape("expert_gating_func", 0) == SIGMOID


def _normalises(model: GGUFModel) -> bool:
    """Whether weights of the chosen experts sum up to one, which V2 does not have."""
    found = bool(model.shape("expert_weights_norm", False))
    if found and not _is_v3(model):
        raise ValueError(f"{model.path} normalises the weights of experts scored by a softmax")
    return found


def _head_dim(model: GGUFModel, name: str) -> int:
    """Of one head; files with a split up-projection have the latent width under the plain name."""
    whole = model.shape(f"attention.{name}")
    return model.shape(f"attention.{name}_mla", whole)


def _rope_parameters(model: GGUFModel) -> dict[str, Any]:
    theta = float(model.shape("rope.freq_base", 10000.0))
    kind = model.shape("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn":
        raise ValueError(f"{model.path} scales its rotary frequencies by {kind!r}: not supported")
    mscale = decimal(10.0 * model.shape("rope.scaling.yarn_log_multiplier"))
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": decimal(model.shape("rope.scaling.factor")),
        "original_max_position_embeddings": model.shape("rope.scaling.original_context_length"),
        "beta_fast": decimal(model.shape("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": decimal(model.shape("rope.scaling.yarn_beta_slow", 1.0)),
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }
