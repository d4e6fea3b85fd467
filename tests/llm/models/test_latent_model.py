"""DeepSeek models in the engine: what is kept of a token, and every form of its attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_engine_models import LATENT, config_of, save  # noqa: E402
from tiny_models import assert_idle, eager_logprobs, random_prompts  # noqa: E402

from anabranch.llm.bench.bench_options import LatencyOptions  # noqa: E402
from anabranch.llm.bench.latency import run_latency  # noqa: E402
from anabranch.llm.engine.config import EngineConfig  # noqa: E402
from anabranch.llm.engine.limits import size  # noqa: E402
from anabranch.llm.engine.llm import LLM  # noqa: E402
from anabranch.llm.models import load_model  # noqa: E402
from anabranch.llm.models.dummy_model import dummy_config  # noqa: E402
from anabranch.llm.models.fused_projections import join_projections  # noqa: E402
from anabranch.llm.models.latent_attention import LatentAttention, use_latent_attention  # noqa: E402
from anabranch.llm.models.model_config import num_weight_bytes  # noqa: E402
from anabranch.llm.runner import latent_step  # noqa: E402
from anabranch.llm.runner.graphs import GraphKey  # noqa: E402
from anabranch.llm.runner.model_attention import NAME, register  # noqa: E402
from anabranch.llm.runner.step_layout import HostLens  # noqa: E402
from anabranch.llm.sampling.params import SamplingParams  # noqa: E402

NAMES = ("deepseek-v2", "deepseek-v3")
WIDTH = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=NAMES)
def saved(request: Any, tmp_path_factory: Any) -> tuple[Any, str]:
    """A model of transformers, and the directory it was written to."""
    path: Path = tmp_path_factory.mktemp("latent")
    torch.manual_seed(0)
    return save(request.param, path), str(path)


def layer_caches(llm: LLM) -> list[Any]:
    layers = llm.engine._launcher._built.runner._layers
    assert all(isinstance(layer, LatentAttention) for layer in layers)
    return [layer.anabranch_cache for layer in layers]


def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' own generate() gives."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": max_tokens, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return found[0, len(prompt) :].tolist()


def test_a_token_takes_one_row_of_the_latent_width(saved: tuple[Any, str]) -> None:
    llm = LLM(saved[1], device="cpu", page_size=4, max_model_len=64, max_num_seqs=2)
    limits = llm.engine._launcher._built.limits
    for cache in layer_caches(llm):
        assert cache.k.shape == (limits.num_pages, 4, 1, WIDTH)
        num_bytes = cache.k.untyped_storage().nbytes()
        assert num_bytes == limits.num_pages * 4 * WIDTH * 4
        assert cache.v.untyped_storage().data_ptr() == cache.k.untyped_storage().data_ptr()


def test_tokens_of_generate(saved: tuple[Any, str]) -> None:
    model, path = saved
    prompts = random_prompts(5, (2, 30, 61))
    speculative = {"method": "ngram", "min_ngram": 1}
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    for options in ({}, {"speculative": speculative, "join_projections": False}):
        llm = LLM(path, device="cpu", page_size=4, **options)
        assert [found.outputs[0].token_ids for found in llm.generate(prompts, GREEDY)] == expected
        assert_idle(llm)


def test_a_prefix_is_used_again(saved: tuple[Any, str]) -> None:
    model, path = saved
    (prefix, *ends) = random_prompts(7, (90, 8, 5))
    llm = LLM(path, device="cpu", page_size=4)
    for prompt in (prefix, prefix + ends[0], prefix + ends[1]):
        (found,) = llm.generate([prompt], GREEDY)
        assert found.outputs[0].token_ids == greedy(model, prompt, 12)
    assert found.num_cached_tokens == len(prefix) // 4 * 4


def test_every_form_of_attention_gives_the_same_logits(
    saved: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts over a context are expanded, in several pieces; decoding is absorbed.

    How a prompt is cut is decided once for all layers of a step.
    """
    model, path = saved
    calls: dict[str, int] = {"context": 0, "fresh": 0, "absorbed": 0}
    layouts: list[Any] = []
    attend_prompt, state = latent_step.attend_latent_prompt, latent_step.Step.attend_entry

    def counted(*args: Any, **options: Any) -> Any:
        if "layout" in options:  # within a step
            calls["context" if any(options["context_lens"]) else "fresh"] += 1
            layouts.append(options["layout"])
        return attend_prompt(*args, **options)

    def counted_state(step: Any, q: torch.Tensor, place: int, keys: Any, rules: Any) -> Any:
        calls["absorbed"] += keys.kind == "latent"
        return state(step, q, place, keys, rules)

    monkeypatch.setattr(latent_step, "attend_latent_prompt", counted)
    monkeypatch.setattr(latent_step.Step, "attend_entry", counted_state)
    prompts = random_prompts(8, (150, 31, 200))
    llm = LLM(path, device="cpu", page_size=4, max_num_batched_tokens=64, max_workspace_mib=0.12)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=5, ignore_eos=True)
    for found in llm.generate(prompts, params):
        output = found.outputs[0]
        exact = eager_logprobs(model, [*found.prompt_token_ids, *output.token_ids])
        rows = exact[len(found.prompt_token_ids) - 1 : -1]
        for entry, row in zip(output.logprobs or [], rows, strict=True):
            for token, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[token].item(), abs=2e-4)
    assert all(calls.values()), calls
    assert layouts[0::2] == layouts[1::2], "two layers share one"
    assert any(len(layout.pieces) > 1 for layout in layouts)


def test_warming_up_expands_prompts_in_groups(
    saved: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a fresh prompt and one over a long context, whose pages are left as they were."""
    llm = LLM(saved[1], device="cpu", page_size=4, max_model_len=256)
    before = [cache.k.clone() for cache in layer_caches(llm)]
    contexts: list[int] = []
    expand = latent_step.attend_latent_prompt

    def observed(*given: Any, **options: Any) -> Any:
        contexts.extend(options["context_lens"])
        return expand(*given, **options)

    monkeypatch.setattr(latent_step, "attend_latent_prompt", observed)
    llm.engine._launcher._built.runner.warm_up([GraphKey(64, 1), GraphKey(1, 1), GraphKey(512, 1)])
    assert set(contexts) == {0, 256 - 64}
    for cache, old in zip(layer_caches(llm), before, strict=True):
        assert torch.equal(cache.k, old)


def test_weights_stay_one_copy(saved: tuple[Any, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved[1])
    count = model.num_parameters()
    assert use_latent_attention(model) == 2
    assert model.num_parameters() == count
    assert join_projections(model) == 2 + 1 + 1  # attention, dense feed-forward, shared experts
    assert model.num_parameters() == count


def test_a_budget_too_small_is_refused(saved: tuple[Any, str]) -> None:
    with pytest.raises(ValueError, match="max_workspace_mib must be above 0, got 0"):
        LLM(saved[1], device="cpu", max_workspace_mib=0)
    with pytest.raises(ValueError, match=r"max_workspace_mib 0\.001 is too small"):
        LLM(saved[1], device="cpu", max_workspace_mib=0.001)


def test_decode_steps_are_timed(tmp_path: Path) -> None:
    config_of("deepseek-v2").save_pretrained(tmp_path)
    sizes: Any = {"input_len": 8, "output_len": 4, "batch": 2, "iterations": 1, "warmup": 0}
    options = LatencyOptions(model=f"dummy:{tmp_path}", device="cpu", **sizes)
    (row,) = run_latency(options, lambda *_: None).rows
    assert row["ms_a_step"] > 0 and row["prefill_ms"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"compile": True}], ids=str)
def test_tokens_on_a_gpu(saved: tuple[Any, str], options: dict[str, Any]) -> None:
    """Decoding and prompts by graphs, with routing done anew at every replay."""
    model, path = saved
    prompts = random_prompts(5, (2, 30, 61, 150))
    expected = [greedy(model, prompt, 12) for prompt in prompts]
    for more in ({}, {"speculative": {"method": "ngram", "min_ngram": 1, "adaptive": False}}):
        llm = LLM(path, device="cuda", dtype="float32", max_num_seqs=4, **options, **more)
        runner = llm.engine._launcher._built.runner
        assert bool(len(runner.graphs)) == options.get("cuda_graphs", True)
        for _ in range(2):
            found = llm.generate(prompts, GREEDY)
            assert [one.outputs[0].token_ids for one in found] == expected
        assert_idle(llm)


def test_shipped_shapes() -> None:
    """The cut V3 differs from V3 in the number of layers and experts only."""
    lite, cut = dummy_config("deepseek-v2-lite"), dummy_config("deepseek-v3-cut")
    assert lite.kv_lora_rank + lite.qk_rope_head_dim == 576
    whole = transformers.DeepseekV3Config().to_dict()
    names = [name for name in whole if any(name.endswith(x) for x in ("size", "dim", "rank"))]
    assert len(names) > 8
    kept = [*names, "num_attention_heads", "n_group", "topk_group", "num_experts_per_tok"]
    assert {name: whole[name] for name in kept} == {name: cut.to_dict()[name] for name in kept}
    assert cut.num_hidden_layers == 8 and cut.n_routed_experts == 64
    assert num_weight_bytes(cut, torch.bfloat16) < 48e9


def test_dealt_pages_are_refused(saved: tuple[Any, str]) -> None:
    register()
    config = EngineConfig(model=saved[1], device="cpu", context_parallel=2)
    loaded = load_model(saved[1], device="cpu", attn_implementation=NAME)
    use_latent_attention(loaded.model)
    with pytest.raises(ValueError, match="context_parallel 2: latent rows are not dealt out"):
        size(config, loaded, None, torch.device("cpu"), lambda *_: None)


def test_lengths_of_some_sequences() -> None:
    lens = HostLens((1, 3, 2), (7, 0, 5))
    assert lens.within(slice(0, 6)) == lens
    assert lens.within(slice(1, 6)) == HostLens((3, 2), (0, 5))
    assert lens.within(slice(0, 1)) == HostLens((1,), (7,))
