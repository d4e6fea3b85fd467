"""GGUF files of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf_blocks import random_rows
from tokenizers.pre_tokenizers import ByteLevel

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def tiny_llama(**changes: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Two control tokens, all bytes, the merges of some words; then filling."""
    letters = sorted(ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "1 2", "12 3", "123 4", "Ġ 1", "Ġ hello"]
    tokens = ["<end>", "<start>", *letters, *(merge.replace(" ", "") for merge in merges)]
    return tokens + [f"<unused{i}>" for i in range(size - len(tokens))], merges


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        layer, _, below = name.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[below]}.weight"
    return GGUF_NAMES[name] + ".weight"


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows i and i + dim / 2 of each head side by side, as llama.cpp rotates them."""
    first, second = weight.unflatten(0, (num_heads, 2, -1)).unbind(1)
    return torch.stack([first, second], 2).flatten(0, 2)


def write_gguf(
    path: Path, model: Any, *, pre: str = "smollm", arch: str = "llama", formats: Any = None
) -> Path:
    """A file of a model; `formats` are those of matrices by a part of their names in the file."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens, merges = byte_level_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}")
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 500000.0 ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        factors = plain / model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        num_heads = next((heads[part] for part in name.split(".") if part in heads), 0)
        rotated = num_heads and arch == "llama"
        values = interleaved(weight, num_heads) if rotated else weight
        _add(writer, gguf_name(name), values.contiguous().numpy(), formats or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, values: Any, formats: dict[str, str]) -> None:
    found = next((kind for part, kind in formats.items() if part in name), None)
    if found is None or values.ndim != 2:
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[found]
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:  # gguf reads it only
        raw, _ = random_rows(found, *values.shape, seed=len(name))
    writer.add_tensor(name, raw, raw_dtype=kind)
