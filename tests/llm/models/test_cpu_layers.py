"""Norms and decoder layers by CPU kernels give what the model's own give, or are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import SHAPE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from anabranch.kernels.cpu.native import native
from anabranch.llm.models.cpu_layers import CpuRMSNorm, use_cpu_norms
from anabranch.llm.models.fused_layers import FusedLayer, fuse_decoder_layers
from anabranch.llm.models.fused_projections import gate_joined, join_projections
from anabranch.llm.models.row_linear import use_row_linear

pytestmark = pytest.mark.skipif(native() is None, reason="needs a C compiler")


def model_of(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    given = {**SHAPE, "model_type": model_type, "architectures": None, **changes}
    config = AutoConfig.for_model(**given)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 1.0, 0.2)
    return model


def prepare(model: nn.Module) -> tuple[int, int]:
    """Everything an engine does to a model on a CPU; norms and layers replaced."""
    join_projections(model)
    use_row_linear(model)
    gate_joined(model)
    return use_cpu_norms(model), fuse_decoder_layers(model)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("model_type", "changes", "norms", "layers"),
    [
        ("llama", {}, 5, 2),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}, 5, 2),
        ("qwen2", {}, 5, 2),
        ("mistral", {"sliding_window": 3}, 5, 2),
        ("qwen3", {}, 9, 2),  # norms of heads of q and k
        ("olmo2", {}, 9, 0),  # norms of all heads together
        ("granite", {"residual_multiplier": 0.5}, 5, 0),
        ("gemma2", {"query_pre_attn_scalar": 16}, 0, 0),  # norms by 1 + weight, four a layer
        ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2}, 0, 0),
    ],
)
def test_values(model_type: str, changes: dict[str, Any], norms: int, layers: int) -> None:
    model = model_of(model_type, **changes)
    tokens = torch.arange(12)[None] * 7 % 97
    expected = model(tokens, use_cache=False).logits
    assert prepare(model) == (norms, layers)
    assert sum(isinstance(x, CpuRMSNorm) for x in model.modules()) == norms
    assert sum(isinstance(x, FusedLayer) for x in model.modules()) == layers
    actual = model(tokens, use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


@torch.inference_mode()
def test_a_layer_keeps_the_window_of_its_attention() -> None:
    model = model_of("mistral", sliding_window=3)
    prepare(model)
    layer = next(x for x in model.modules() if isinstance(x, FusedLayer))
    assert layer.arguments["sliding_window"] == 3


@torch.inference_mode()
def test_what_is_unusual_goes_to_the_layer_itself() -> None:
    """A cache of transformers' own, a batch, another dtype."""
    model = model_of("llama")
    tokens = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 6]])
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
    prepare(model)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)
    logits = model(tokens).logits
    model.double()
    torch.testing.assert_close(model(tokens).logits.float(), logits, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_weights_are_held_once() -> None:
    model = model_of("llama", tie_word_embeddings=True, vocab_size=96)
    before = sum(weight.numel() for weight in model.parameters())
    prepare(model)
    held = (*model.parameters(), *model.buffers())
    assert sum(x.numel() for x in model.parameters()) == before
    assert len({x.untyped_storage().data_ptr() for x in held}) == len(held)
