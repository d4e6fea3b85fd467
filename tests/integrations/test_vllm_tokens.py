"""vLLM on our backend gives the tokens of its own: `make test-vllm`, where vLLM is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for vLLM's build for CPUs")
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-gram drafts": {"speculative_config": NGRAM},
}


def generate(model: Path, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).parents[1] / "support" / "vllm_tokens.py"
    command = [sys.executable, script, model, backend, json.dumps(options)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows in every other layer, and softcaps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        sliding_window=16, attn_logit_softcapping=3.0, query_pre_attn_scalar=32, **SMALL
    )
    model = Gemma2ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.05  # or every token is followed by itself
    directory = tmp_path_factory.mktemp("gemma2")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent rows of 512 + 64 columns, which vLLM's own kernels need too."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    sizes = {**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 2, "head_dim": 64}
    config = DeepseekV2Config(
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,  # no experts
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        **sizes,
    )
    directory = tmp_path_factory.mktemp("deepseek")
    DeepseekV2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(directory)
    return directory


def check(
    model: Path, options: dict[str, Any], own: str, backend: str = "AnabranchBackend"
) -> dict[str, Any]:
    theirs, ours = generate(model, own, options), generate(model, "CUSTOM", options)
    assert ours["backends"] == [backend] != theirs["backends"]
    assert [len(batch) for batch in ours["tokens"]] == [16, 16, 1]
    assert ours["tokens"] == theirs["tokens"]
    assert len({token for answer in ours["tokens"][0] for token in answer}) > 16
    return ours


@on_cpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_vllms_own_backend(setting: str) -> None:
    from anabranch.llm.models.fetched_models import smollm2_directory

    ours = check(smollm2_directory(), SETTINGS[setting], "CPU_ATTN")
    assert ours["prefix_hits"] > 0
    assert bool(ours["drafts"]) == bool(SETTINGS[setting])


@on_cpu
def test_windows_and_softcaps(tiny_gemma: Path) -> None:
    check(tiny_gemma, {}, "CPU_ATTN")


@on_cpu
def test_latent_caches(tiny_deepseek: Path) -> None:
    check(tiny_deepseek, {}, "CPU_MLA", "AnabranchLatentBackend")


@on_cpu
def test_fp8_caches() -> None:
    """A key that is off by a rounding may get another code, so answers only begin alike."""
    from anabranch.llm.models.fetched_models import smollm2_directory

    model, options = smollm2_directory(), {"kv_cache_dtype": "fp8"}
    theirs, ours = generate(model, "CPU_ATTN", options), generate(model, "CUSTOM", options)
    assert ours["backends"] == ["AnabranchBackend"] != theirs["backends"]
    assert ours["prefix_hits"] > 0
    assert ours["tokens"][0] == ours["tokens"][1], "with prefixes found in the cache"
    first = [[answer[0] for answer in tokens["tokens"][0]] for tokens in (ours, theirs)]
    assert first[0] == first[1]


@on_cpu
def test_latent_fp8_caches(tiny_deepseek: Path) -> None:
    plain, fp8 = (
        generate(tiny_deepseek, "CUSTOM", {"kv_cache_dtype": name}) for name in ("auto", "fp8_e4m3")
    )
    assert fp8["backends"] == ["AnabranchLatentBackend"]
    assert fp8["tokens"] != plain["tokens"]
    alike = [a[0] == b[0] for a, b in zip(fp8["tokens"][0], plain["tokens"][0], strict=True)]
    assert sum(alike) > len(alike) // 2


@on_cpu
def test_a_draft_model_changes_no_token(tiny_llama: Path) -> None:
    draft = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 3}
    drafted = {"speculative_config": {**draft, "attention_backend": "CUSTOM"}}
    without, ours = (generate(tiny_llama, "CUSTOM", options) for options in ({}, drafted))
    assert ours["backends"] == ["AnabranchBackend"]
    assert ours["tokens"] == without["tokens"]
    assert ours["drafts"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [({"kv_cache_dtype": "fp8_e5m2"}, "got 'fp8_e5m2'")],
)
def test_options_are_refused_at_the_start(
    tiny_gemma: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(AssertionError, match=named):
        generate(tiny_gemma, "CUSTOM", options)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_graphs_give_the_tokens_of_eager(tiny_gemma: Path, setting: str, mode: str) -> None:
    options = SETTINGS[setting]
    graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}
    eager = generate(tiny_gemma, "CUSTOM", options)
    assert generate(tiny_gemma, "CUSTOM", {**options, **graphs})["tokens"] == eager["tokens"]


GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
LATENT_SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "prompts in vLLM's expanded way": {"max_num_batched_tokens": 512},
    "graphs": {**GRAPHS, "max_num_batched_tokens": 512},
    "graphs and drafts": {**GRAPHS, "speculative_config": NGRAM},
    "fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("setting", LATENT_SETTINGS)
def test_latent_caches_on_a_gpu(tiny_deepseek: Path, setting: str) -> None:
    """In bfloat16, which vLLM's prompts need: roundings differ, so answers only begin alike."""
    options = {"dtype": "bfloat16", **LATENT_SETTINGS[setting]}
    ours = generate(tiny_deepseek, "CUSTOM", options)
    assert ours["backends"] == ["AnabranchLatentBackend"]
    eager = {name: options[name] for name in ("dtype", "kv_cache_dtype") if name in options}
    theirs = generate(tiny_deepseek, "TRITON_MLA", eager)
    assert theirs["backends"] == ["TritonMLABackend"]
    assert bool(ours["drafts"]) == ("drafts" in setting)
    for mine, own in zip(ours["tokens"][:2], theirs["tokens"][:2], strict=True):
        alike = [a[:2] == b[:2] for a, b in zip(mine, own, strict=True)]
        assert sum(alike) >= 12, alike
