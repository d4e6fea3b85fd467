"""Models cut over ranks give the logits, and in an engine the tokens, of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import assert_all_pass

pytest.importorskip("transformers")

from tiny_models import GREEDY, outputs, random_prompts, source

import anabranch.engine.build as engine_build
from anabranch.distributed.shard_model import shard_model
from anabranch.engine.llm import LLM
from anabranch.models import load_model

SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, few kv heads": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "Llama, tied": {"tie_word_embeddings": True, "vocab_size": 98},
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "GPT-OSS": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids[None], use_cache=False).logits[0]


def logits_of_the_whole() -> None:
    """In float64, where another order of addition is far below any mistake."""
    torch.manual_seed(0)
    ids = torch.randint(2, 96, (13,))
    for name, change in SHAPES.items():
        loaded = load_model(
            source(**change), device="cpu", dtype=torch.float64, attn_implementation="eager"
        )
        loaded.model.set_experts_implementation("eager")  # the others refuse float64
        whole = logits(loaded.model, ids)
        weights = sum(weight.numel() for weight in loaded.model.parameters())
        assert shard_model(loaded.model) >= 8, name
        kept = sum(weight.numel() for weight in loaded.model.parameters())
        assert kept < weights, name
        torch.testing.assert_close(logits(loaded.model, ids), whole, msg=lambda m, n=name: n + m)


def tokens_of_the_whole() -> None:
    """Every rank runs the engine on its part; each draws the same tokens from the same logits."""
    prompts, params = random_prompts(lengths=(3, 17, 33)), replace(GREEDY, max_tokens=6)
    for name, change in SHAPES.items():
        expected: list[Any] = [None]
        if dist.get_rank() == 0:
            expected = [outputs(tiny_of(change), prompts, params)]
        dist.broadcast_object_list(expected)
        engine_build.load_model = load_part
        try:
            llm = tiny_of(change)
        finally:
            engine_build.load_model = load_model
        assert outputs(llm, prompts, params) == expected[0], name


def load_part(*given: Any, **options: Any) -> Any:
    loaded = load_model(*given, **options)
    shard_model(loaded.model)
    return loaded


def tiny_of(change: dict[str, Any]) -> LLM:
    drafts = {"method": "ngram", "num_drafts": 2, "adaptive": False}
    sizes = {"kv_cache_gib": 0.01, "max_num_batched_tokens": 64}
    return LLM(source(**change), device="cpu", speculative=drafts, **sizes)


def bad_shapes() -> None:
    num_ranks = dist.get_world_size()
    for change, message in (
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "the 1 heads of .* cannot be cut"),
        ({"intermediate_size": 97}, "the 97 outputs of .*gate_proj cannot be cut over"),
    ):
        model = load_model(source(**change), device="cpu").model
        with pytest.raises(ValueError, match=message):
            shard_model(model)
    model = load_model(
        source(num_attention_heads=12, num_key_value_heads=6, hidden_size=96), device="cpu"
    ).model
    if num_ranks == 4:
        with pytest.raises(ValueError, match=r"the 6 kv heads of .* neither cut nor repeated over"):
            shard_model(model)
    model.tp_plan["model.norm"] = "sequence_parallel"
    with pytest.raises(ValueError, match="a tensor-parallel plan with sequence_parallel; known"):
        shard_model(model)


CHECKS = [logits_of_the_whole, tokens_of_the_whole, bad_shapes]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks(num_ranks: int) -> None:
    """One group of processes runs all checks; one test, so that it starts once."""
    assert_all_pass(num_ranks, CHECKS)
