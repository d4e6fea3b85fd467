"""Architectures of transformers in the engine against their eager attention, by all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import SHAPE, VOCAB, as_on_gpu, assert_idle, eager_logprobs, random_prompts  # noqa: E402

from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.models import load_model  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402

WINDOW = 9  # shorter than most prompts and than a page
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
GROUPS = {"n_group": 2, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, odd group": (
        "Llama",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, **MIXED}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {"sliding_window": None}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **MIXED},
    ),
    "gemma3": ("Gemma3Text", MIXED),
    "gpt-oss": ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, **MIXED}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
    ),
    "deepseek-v2": ("DeepseekV2", LATENT),
    "deepseek-v2, query of low rank, groups": (
        "DeepseekV2",
        LATENT | GROUPS | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | GROUPS | {"q_lora_rank": 24}),
    "deepseek-v3, halves": ("DeepseekV3", LATENT | GROUPS | {"rope_interleave": False}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "olmo2": ("Olmo2", {}),
    "stablelm": ("StableLm", {}),
    "granite": ("Granite", {"attention_multiplier": 0.1, "logits_scaling": 2.0}),
    "cohere": ("Cohere", {}),
}
PROMPTS = random_prompts(3, (5, 1, 40, 17, 33))


def config_of(name: str) -> Any:
    family, own = MODELS[name]
    shape = {k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}
    return getattr(transformers, f"{family}Config")(**{**shape, "eos_token_id": None, **own})


def save(name: str, path: Path) -> Any:
    """Write a directory of a random model; the model itself, eager, is given back."""
    config = config_of(name)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    for key, weight in model.named_parameters():
        if "sinks" in key or "bias" in key:
            torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(path)
    return model


def dummy(name: str, path: Path) -> Any:
    """The same for a model that transformers has no sdpa for: only its config is written."""
    config_of(name).save_pretrained(path)
    return load_model(f"dummy:{path}", device="cpu", attn_implementation="eager").model


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    named = "gpt-oss" in name
    model = dummy(name, tmp_path) if named else save(name, tmp_path)
    where = f"dummy:{tmp_path}" if named else str(tmp_path)
    speculative = {"method": "ngram", "min_ngram": 1, "adaptive": False}
    params = SamplingParams(
        temperature=0, max_tokens=12, prompt_logprobs=VOCAB, logprobs=VOCAB, ignore_eos=True
    )
    engines = {
        "plain": LLM(where, device="cpu"),
        "chunked": LLM(where, device="cpu", max_num_batched_tokens=7, max_num_seqs=3, page_size=4),
        "drafts": as_on_gpu(LLM(where, device="cpu", speculative=speculative)),
    }
    for llm in engines.values():
        for found in llm.generate(PROMPTS, params):
            output = found.outputs[0]
            ids = [*found.prompt_token_ids, *output.token_ids]
            exact = eager_logprobs(model, ids)[:-1]
            entries = [*(found.prompt_logprobs or [])[1:], *(output.logprobs or [])]
            ours = torch.tensor(
                [[entry[token].logprob for token in range(VOCAB)] for entry in entries if entry]
            )
            error = (ours.double() - exact).abs().amax(1)
            assert error.max() < 1e-4 * exact.abs().max(), error.tolist()
            best = exact[len(found.prompt_token_ids) - 1 :].argmax(1)
            assert output.token_ids == best.tolist()
        assert_idle(llm)


def test_the_whole_context_is_used_with_learned_positions(tmp_path: Path) -> None:
    """Padding behind the last token of a context has no position of its own."""
    model = save("gpt2", tmp_path)
    speculative = {"method": "ngram", "min_ngram": 1, "adaptive": False, "num_drafts": 6}
    llm = as_on_gpu(LLM(str(tmp_path), device="cpu", speculative=speculative))
    prompts = [[5, 6, 7] * 82, [9, 8] * 100]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for prompt, found in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = [*prompt, *found.outputs[0].token_ids]
        assert len(ids) == 256
        best = eager_logprobs(model, ids).argmax(1).tolist()
        assert ids[len(prompt) :] == best[len(prompt) - 1 : -1]


def test_a_draft_model_with_fewer_positions_shortens_the_context(tmp_path: Path) -> None:
    save("gpt2", tmp_path / "target")
    config = config_of("gpt2")
    config.n_positions = 64
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "draft")
    speculative = {"method": "draft", "model": str(tmp_path / "draft"), "adaptive": False}
    llm = LLM(str(tmp_path / "target"), device="cpu", speculative=speculative)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (found,) = llm.generate([[5, 6, 7]], params)
    assert len(found.outputs[0].token_ids) == 64 - 3


def test_layers_that_keep_other_states_are_refused(tmp_path: Path) -> None:
    shape = {k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}
    config = transformers.Lfm2Config(**shape, layer_types=["conv", "full_attention"])
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has layers of kind"):
        LLM(str(tmp_path), device="cpu")
    both = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "mamba_n_groups": 1}
    transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(**shape, **both, mamba_d_state=8)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="FalconH1ForCausalLM has layers of kind"):
        LLM(str(tmp_path), device="cpu")


def test_windows_that_only_a_mask_would_tell_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    shape = {k: v for k, v in SHAPE.items() if k not in ("architectures", "model_type")}
    config = transformers.Qwen2MoeConfig(
        **shape, **experts, shared_expert_intermediate_size=32, use_sliding_window=True, **MIXED
    )
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_attention"):
        LLM(str(tmp_path), device="cpu")


TINY = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = TINY | {"intermediate_size": 96}
GPTJ = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
BART = {"vocab_size": VOCAB, "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 96}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two calls of attention": ("DiffLlama", WIDE, "DiffLlamaAttention calls attention twice"),
    "layers run in turns": ("HrmText", WIDE, "HrmTextAttention calls attention twice"),
    "an encoder": ("Bert", WIDE, "BertSelfAttention is not causal"),
    "positions that count on from a cache": (
        "Bart",
        BART | {"decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False},
        "BartForCausalLM does not use position_ids",
    ),
    "positions from 2 on": ("Roberta", WIDE | {"is_decoder": True}, "numbers the tokens of a text"),
    "alibi": ("Falcon", TINY | {"alibi": True}, "has attention classes of its own"),
    "gpt-j": ("GPTJ", GPTJ, "has attention classes of its own"),
    "gpt-neo": (
        "GPTNeo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "has attention classes of its own",
    ),
    "mpt": (
        "Mpt",
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4},
        "MptForCausalLM needs more than tokens and their positions",
    ),
    "bloom": (
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "BloomForCausalLM does not call attention through",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_pages_cannot_serve_are_refused(name: str, tmp_path: Path) -> None:
    """They would give wrong tokens, or fail with an error that says nothing."""
    family, shape, message = REFUSED[name]
    getattr(transformers, f"{family}Config")(**shape).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(f"dummy:{tmp_path}", device="cpu")
