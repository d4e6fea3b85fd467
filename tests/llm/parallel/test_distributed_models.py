"""Models cut over ranks give the logits of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import NUM_RANKS, assert_all_pass

pytest.importorskip("transformers")

from tiny_models import source
from torch import nn

import anabranch.llm.engine.build as engine_build
from anabranch.distributed.rank_group import (
    check_agreement,
    find_group,
    least_of_all,
    make_on_all,
)
from anabranch.llm.models import load_model
from anabranch.llm.parallel.shard_model import shard_model
from anabranch.llm.parallel.sharded_linear import SummedLinear

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
    "Phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "OLMo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "Qwen3 MoE": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
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


def bad_shapes() -> None:
    model = load_model(
        source(num_attention_heads=1, num_key_value_heads=1, intermediate_size=97), device="cpu"
    ).model
    with pytest.raises(ValueError, match=r"with 1 heads and 1 kv heads; .*gate_proj with 97 outp"):
        shard_model(model)
    model.tp_plan["model.norm"] = "sequence_parallel"
    with pytest.raises(ValueError, match="a tensor-parallel plan with sequence_parallel; known"):
        shard_model(model)


def failures_are_shared() -> None:
    """One rank's error is an error on all; so are versions and models that differ."""
    ranks = find_group(None)

    def make() -> int:
        if ranks.rank == 1:
            raise OSError("no space")
        return ranks.rank

    expected = (OSError, "^no space") if ranks.rank == 1 else (ValueError, "rank 1 failed: no sp")
    with pytest.raises(expected[0], match=expected[1]):
        make_on_all(ranks, make)
    assert least_of_all(ranks, ranks.rank + 5) == 5
    loaded = load_model(source(), device="cpu")
    same = engine_build._identity(loaded)
    check_agreement(ranks, **same)
    changed = [{"the version of torch": f"{ranks.rank}.0"}]
    loaded.config.rms_norm_eps = 0.1 * ranks.rank
    changed.append(engine_build._identity(loaded))
    for change, name in zip(changed, ("the version of torch", "the model's config"), strict=True):
        with pytest.raises(ValueError, match=f"{name} differs between ranks: .* on rank 1"):
            check_agreement(ranks, **same | change)


def compiled_sums() -> None:
    """Compiled code calls the collective as an operator, the same for every layer."""
    ranks = find_group(None)
    linear = nn.Linear(8, 6)
    nn.init.constant_(linear.weight, 0.5)
    nn.init.constant_(linear.bias, 1.0)
    summed = SummedLinear(linear, slice(2 * ranks.rank, 2 * ranks.rank + 2), ranks)
    compiled = torch.compile(summed, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(compiled(torch.ones(3, 2)), torch.full((3, 6), 1.0 + ranks.num_ranks))


CHECKS = [logits_of_the_whole, bad_shapes, failures_are_shared, compiled_sums]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks(num_ranks: int) -> None:
    """One group of processes runs all checks; one test, so that it starts once."""
    assert_all_pass(num_ranks, CHECKS)
