"""GGUF files of deepseek2: the logits of the model they were written from, or what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from gguf.quants import quantize  # noqa: E402
from gguf_files import SIZES, byte_level_vocabulary  # noqa: E402
from test_engine_models import GROUPS, LATENT  # noqa: E402
from test_models import logits_of  # noqa: E402

from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.models import load_model  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE_DIR", str(tmp_path / "cache"))


def tiny(family: str, **changes: Any) -> Any:
    shape = SIZES | LATENT | {"initializer_range": 0.2} | changes
    config = getattr(transformers, f"Deepseek{family}Config")(**shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.normal_(std=0.1)
    return model


def tensors_of(model: Any, *, split: bool, joined: bool) -> dict[str, torch.Tensor]:
    """As llama.cpp names and cuts them."""
    config, found = model.config, dict[str, torch.Tensor]()
    for full, weight in model.state_dict().items():
        name = full.removesuffix(".weight")
        layer, prefix = "", ""
        if name.startswith("model.layers."):
            layer, _, name = name.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{layer}."
        if name == "mlp.experts.gate_up_proj":
            gate, up = weight.chunk(2, 1)
            parts = {"gate_up": weight} if joined else {"gate": gate, "up": up}
            found |= {f"{prefix}ffn_{part}_exps.weight": x for part, x in parts.items()}
        elif name == "self_attn.kv_b_proj" and split:
            heads = weight.unflatten(0, (config.num_attention_heads, -1))
            k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            found |= {
                f"{prefix}attn_k_b.weight": k.transpose(1, 2),
                f"{prefix}attn_v_b.weight": v,
            }
        else:
            mine = NAMES[name]
            found[prefix + (mine if "." in mine else f"{mine}.weight")] = weight
    return found


def write(path: Path, model: Any, tensors: dict[str, torch.Tensor], *, split: bool) -> Path:
    config = model.config
    is_v3 = config.model_type == "deepseek_v3"
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if split else config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    whole = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    latent = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    writer.add_key_length((latent if split else whole)[0])
    writer.add_value_length((latent if split else whole)[1])
    if split:
        writer.add_key_length_mla(whole[0])
        writer.add_value_length_mla(whole[1])
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if (config.n_group or 1) > 1:
        writer.add_expert_group_count(config.n_group)
        if config.topk_group != config.n_group:
            writer.add_expert_group_used_count(config.topk_group)
    if is_v3:
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    tokens, merges = byte_level_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3" if is_v3 else "deepseek-llm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for name, weight in tensors.items():
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("V2", {"n_group": None}),
    "v2, groups": (
        "V2",
        GROUPS | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"},
    ),
    "v3": ("V3", GROUPS | {"q_lora_rank": 24}),
    "v3, all groups used": ("V3", {"n_group": 2, "topk_group": 2, "q_lora_rank": 24}),
    "v3, no groups": ("V3", {"n_group": 1, "topk_group": 1, "q_lora_rank": 24}),
    "v3, no yarn": (
        "V3",
        GROUPS | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


@pytest.mark.parametrize("split", [False, True], ids=["kv_b", "k_b and v_b"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_the_model_computed(case: str, split: bool, tmp_path: Path) -> None:
    family, changes = CASES[case]
    model = tiny(family, **changes)
    tensors = tensors_of(model, split=split, joined=split)
    path = write(tmp_path / "tiny.gguf", model, tensors, split=split)
    loaded = load_model(str(path), device="cpu")
    torch.testing.assert_close(logits_of(loaded.model), logits_of(model), rtol=0, atol=0)
    assert loaded.tokenizer is not None and loaded.tokenizer.eos_token == "<end>"
    assert loaded.config.dtype == torch.float32
    assert loaded.config.n_group == (model.config.n_group or 1)


def test_a_file_runs_in_the_engine(tmp_path: Path) -> None:
    model = tiny("V3", **GROUPS)
    tensors = tensors_of(model, split=True, joined=False)
    llm = LLM(str(write(tmp_path / "a.gguf", model, tensors, split=True)), device="cpu")
    (found,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6))
    ids = torch.tensor([[5, 6, 7, *found.outputs[0].token_ids]])
    best = model(ids).logits[0].argmax(-1).tolist()
    assert found.outputs[0].token_ids == best[2:-1]


def test_quantised_experts(tmp_path: Path) -> None:
    """Blocks of three dimensions are decoded to float16 numbers."""
    model = tiny("V2", moe_intermediate_size=32)
    tensors = tensors_of(model, split=False, joined=False)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write(tmp_path / "plain.gguf", model, tensors, split=False)
    writer = gguf.GGUFWriter(tmp_path / "q8.gguf", "deepseek2")
    reader = gguf.GGUFReader(path)
    for field in reader.fields.values():
        if field.name.startswith(("deepseek2.", "tokenizer.")):
            value = field.contents()
            writer.add_key_value(field.name, value, field.types[0], *field.types[1:][-1:])
    for tensor in reader.tensors:
        if "_exps" in tensor.name:
            writer.add_tensor(tensor.name, quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = load_model(str(tmp_path / "q8.gguf"), device="cpu").model
    ours, exact = (x.model.layers[1].mlp.experts.gate_up_proj for x in (found, model))
    assert 0 < (ours - exact).abs().max() < exact.abs().max() / 127
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("V2", "blk.1.ffn_up_exps.weight", r"lacks 1 tensors: blk\.1\.ffn_up_exps\.weight"),
        ("V2", "blk.0.attn_kv_b.weight", r"lacks 1 tensors: blk\.0\.attn_kv_b\.weight"),
        ("V3", "blk.1.exp_probs_b.bias", r"lacks 1 tensors: blk\.1\.exp_probs_b\.bias"),
    ],
)
def test_missing_tensors_are_named(family: str, name: str, message: str, tmp_path: Path) -> None:
    model = tiny(family, **(GROUPS if family == "V3" else {}))
    tensors = tensors_of(model, split=False, joined=False)
    del tensors[name]
    path = write(tmp_path / "tiny.gguf", model, tensors, split=False)
    with pytest.raises(ValueError, match=message):
        load_model(str(path), device="cpu")


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    model = tiny("V2")
    tensors = tensors_of(model, split=False, joined=False) | {"blk.0.indexer": torch.zeros(4)}
    path = write(tmp_path / "tiny.gguf", model, tensors, split=False)
    with pytest.raises(ValueError, match=r"unknown tensors: blk\.0\.indexer"):
        load_model(str(path), device="cpu")
