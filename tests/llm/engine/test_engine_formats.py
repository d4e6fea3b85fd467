"""Quantised caches in the engine: tokens, errors, memory, options and what saturates."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_engine_models import save
from tiny_models import (
    GREEDY,
    PAGE_BYTES,
    as_on_gpu,
    blurred_source,
    outputs,
    pages,
    random_prompts,
    source,
)
from transformers import AttentionInterface

from anabranch.compositions.quantised_prompt import PageExpander
from anabranch.keys.formats import FORMATS, decode, encode
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.llm import LLM
from anabranch.llm.engine.stats import EngineStats
from anabranch.llm.models import load_model
from anabranch.llm.runner.graphs import PromptKey
from anabranch.llm.runner.kv_cache import (
    CacheFormats,
    LayerShape,
    allocate_layers,
    page_bytes,
    parse_cache_formats,
)
from anabranch.llm.runner.step import Entry, Step
from anabranch.llm.sampling.params import SamplingParams

PAIRS = ["fp8_tensor", "fp8", "int8", "q8_0", "q8_0/fp8", "auto/int8", "fp8/auto"]
PROMPTS = random_prompts(2, (3, 33, 50))
SHAPE = {"head_dim": 32}  # Q8_0 has blocks of 32
NGRAM = {"method": "ngram", "min_ngram": 1, "adaptive": False}
DRAFT = {"method": "draft", "model": blurred_source(), "adaptive": False}
ENGINES: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "preempted": {"kv_cache_gib": pages(8, PAGE_BYTES * 20 // 64), "max_model_len": 90},
    "n-gram": {"speculative": NGRAM},
    "n-gram, expanded": {"speculative": NGRAM | {"scorer": "batch-expansion"}},
    "draft": {"speculative": DRAFT},
}


ON_GPU: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-gram": {"speculative": NGRAM},
    "compiled": {"compile": True},
}


def rounded(x: torch.Tensor, name: str) -> torch.Tensor:
    """Numbers as a cache of a format gives them back."""
    if name == "plain":
        return x
    if name == "bfloat16":
        return x.bfloat16().to(x.dtype)
    codes, scales, _ = encode(x, FORMATS[name], torch.ones(1))
    scales = scales if FORMATS[name].scaling == "block" else scales[..., :1]
    return decode(codes, scales, x.dtype)


def rounding_attention(formats: CacheFormats) -> Any:
    """Causal attention of one sequence in float64 over rounded keys and values."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        k = rounded(key, formats.k).double().repeat_interleave(group, 1)
        v = rounded(value, formats.v).double().repeat_interleave(group, 1)
        scores = query.double() @ k.mT * scaling
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v).to(query.dtype).transpose(1, 2), None

    return attention


@cache
def rounding_model(formats: CacheFormats, head_dim: int) -> Any:
    """transformers' model with an attention that sees rounded keys, always of whole sequences."""
    name = f"rounded_{formats.k}_{formats.v}"
    AttentionInterface.register(name, rounding_attention(formats))
    return load_model(source(head_dim=head_dim), device="cpu", attn_implementation=name).model


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab]"""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(1)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        ids.append(int(logprobs_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@cache
def expected(pair: str, head_dim: int = 32) -> list[list[int]]:
    model = rounding_model(parse_cache_formats(pair), head_dim)
    return [greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_are_those_over_rounded_keys(pair: str) -> None:
    llm = LLM(source(**SHAPE), device="cpu", kv_cache_dtype=pair)
    assert outputs(llm, PROMPTS) == expected(pair)
    assert outputs(llm, PROMPTS) == expected(pair), "with prefixes from the cache"
    assert llm.stats.num_cached_tokens > 0 and not llm.stats.num_saturated


@pytest.mark.parametrize("like_gpu", [False, True], ids=["in turn", "in flight, by graphs"])
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_tokens_are_the_same_however_they_run(options: dict[str, Any], like_gpu: bool) -> None:
    """int8 of 16 columns and a float32 scale take 20 of 64 bytes."""
    llm = LLM(source(), device="cpu", kv_cache_dtype="int8", **options)
    if like_gpu:
        as_on_gpu(llm)
    assert outputs(llm, PROMPTS) == expected("int8", 16)
    stats = llm.stats
    assert ("kv_cache_gib" in options) == (stats.num_preemptions > 0)
    assert ("speculative" in options) == (stats.speculative.num_accepted_tokens > 0)


@pytest.mark.parametrize("options", [{}, ENGINES["chunked"], ENGINES["n-gram"]], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_keys_that_are_decoded_first_give_the_same_tokens(
    pair: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts on a Hopper GPU read them; a budget that is too small changes nothing."""
    pieces: list[int] = []
    groups = PageExpander.groups

    def counted(expander: PageExpander, *given: Any) -> Any:
        pieces.append(given[0].num_keys)
        return groups(expander, *given)

    monkeypatch.setattr(PageExpander, "prefers_expanded", lambda *_: True)
    monkeypatch.setattr(PageExpander, "groups", counted)
    monkeypatch.setattr(Step, "_reads_pages", lambda *_: False)  # a CPU's own kernel
    for budget in (256, 0.001):
        pieces.clear()
        llm = LLM(
            source(**SHAPE), device="cpu", kv_cache_dtype=pair, max_workspace_mib=budget, **options
        )
        assert outputs(llm, PROMPTS) == expected(pair)
        assert bool(pieces) == (budget == 256)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with weights: random ones made on a GPU are not those of a CPU."""
    path = str(tmp_path_factory.mktemp("saved"))
    load_model(source(**SHAPE), device="cpu").model.save_pretrained(path)
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("options", ON_GPU.values(), ids=ON_GPU)
@pytest.mark.parametrize("pair", PAIRS)
def test_tokens_on_a_gpu(pair: str, options: dict[str, Any], saved: str) -> None:
    """Prompts and decodes by graphs."""
    given = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.01, "kv_cache_dtype": pair}
    llm = LLM(saved, **given, **options)
    assert outputs(llm, PROMPTS) == expected(pair)
    assert outputs(llm, PROMPTS) == expected(pair), "with prefixes from the cache"
    assert llm.stats.num_graph_steps > 0 and not llm.stats.num_saturated


# Half a code in units of bfloat16, which rounds by up to 1/512 of an element: e4m3 by 1/16, int8
# by 1/254 of the largest element, here about four times the others.
UNITS = {"fp8_tensor": 32, "fp8": 32, "int8": 8, "q8_0": 8}


@pytest.mark.parametrize("name", UNITS)
def test_errors_are_bounded_by_those_of_bfloat16(name: str) -> None:
    prompt = PROMPTS[2]
    exact = logprobs_of(rounding_model(CacheFormats(), 32), prompt)
    brain = logprobs_of(rounding_model(CacheFormats("bfloat16", "bfloat16"), 32), prompt)
    llm = LLM(source(**SHAPE), device="cpu", kv_cache_dtype=name)
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    given = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    ours = torch.tensor([each[token].logprob for token, each in given])
    targets = torch.tensor(prompt[1:])[:, None]
    errors = (ours.double() - exact[:-1].gather(1, targets)[:, 0]).abs().mean()
    unit = (brain - exact)[:-1].gather(1, targets).abs().mean()
    assert unit < errors < UNITS[name] * unit


@pytest.mark.parametrize("pair", ["auto", *PAIRS])
def test_bytes_are_what_is_allocated(pair: str) -> None:
    formats = parse_cache_formats(pair)
    layers = [LayerShape(2, 64, 32, torch.float16, formats), LayerShape(1, 32, 32, torch.float32)]
    caches = allocate_layers(layers, 3, 16, torch.device("cpu"))
    held = [x for cache in caches for x in cache.tensors() if x is not None and x.shape != (1,)]
    assert sum(x.nbytes for x in held) == 3 * page_bytes(layers, 16)
    assert not any(x.contiguous().view(torch.uint8).any() for x in held)
    keys = caches[0].keys(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    assert not any(x.any() for x in keys.gather(0)) and keys.dtype == torch.float16


def test_more_pages_fit() -> None:
    room = pages(10, 2 * PAGE_BYTES)
    counts = {
        name: LLM(
            source(**SHAPE), device="cpu", kv_cache_gib=room, kv_cache_dtype=name
        ).engine.limits.num_pages
        for name in ("auto", "q8_0", "fp8_tensor", "auto/fp8_tensor")
    }
    assert counts == {"auto": 10, "q8_0": 37, "fp8_tensor": 40, "auto/fp8_tensor": 16}


def test_what_saturates_is_counted_and_spreads_to_no_other_token() -> None:
    saturated = torch.zeros(1, dtype=torch.int32)
    layer = LayerShape(1, 32, 32, torch.float32, CacheFormats("int8", "q8_0"))
    table, starts = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([0, 1, 2]).int()
    q, k, v = torch.randn(3, 2, 1, 32)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[0, 0, 3], bad_v[0, 0, :2] = torch.nan, torch.inf
    outs: list[torch.Tensor] = []
    for keys, values in ((k, v), (bad_k, bad_v)):
        (cache,) = allocate_layers([layer], 2, 16, torch.device("cpu"), saturated)
        step = Step([Entry(slice(0, 2), starts, torch.ones(2).int(), table)], torch.tensor([0, 16]))
        rules: Any = {"scale": 1.0, "window": None, "softcap": None, "sinks": None}
        outs.append(step.attend(q, keys, values, cache, **rules))
    assert saturated.item() == 3 and outs[1].isfinite().all()
    assert torch.equal(outs[0][1], outs[1][1]) and not torch.equal(outs[0][0], outs[1][0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_engine_counts_what_saturates(device: str) -> None:
    given: Any = {"dtype": "float32", "kv_cache_gib": 0.01, "max_num_seqs": 2}
    llm = LLM(source(**SHAPE), device=device, kv_cache_dtype="auto/fp8_tensor", **given)
    (layer, *_) = llm.engine._launcher._built.runner._layers
    built: Any = layer
    outputs(llm, PROMPTS[:1])
    assert not llm.stats.num_saturated
    cache = built.anabranch_cache
    cache.v_scales.fill_(1e-6)
    outputs(llm, PROMPTS[1:2])
    computed = llm.stats.num_prompt_tokens - len(PROMPTS[0]) + GREEDY.max_tokens - 1
    assert 0 < llm.stats.num_saturated <= computed * 2 * 32
    stats = EngineStats()
    for counter in (5, 2**31 - 1, -(2**31), -1, 3):  # of 32 bits
        stats.count_saturated(counter)
    assert stats.num_saturated == 2**32 + 3


@pytest.mark.parametrize("given", ["fp4", "", "plain", "int8/int8/int8", "q8_0/", "int8,fp8"])
def test_unknown_formats_are_named(given: str) -> None:
    with pytest.raises(ValueError, match=f"q8_0, or two of them.* got {given!r}"):
        EngineConfig(kv_cache_dtype=given)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("latent")
    torch.manual_seed(0)
    save("deepseek-v2", path)
    return str(path)


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))
    given = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    return torch.tensor([each[token].logprob for token, each in given])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int8", "q8_0"])
def test_decoding_first_loses_less_than_the_format(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of three steps; with a budget that is too small, codes are read as they are."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("keys are decoded first on Hopper GPUs")
    pieces: list[int] = []
    groups = PageExpander.groups

    def counted(expander: PageExpander, *given: Any) -> Any:
        pieces.append(given[0].num_keys)
        return groups(expander, *given)

    shape = {"head_dim": 64, "max_position_embeddings": 8192, "num_key_value_heads": 1}
    given: Any = {"device": "cuda", "dtype": "float16", "kv_cache_gib": 0.05, "max_num_seqs": 4}
    given |= {"max_num_batched_tokens": 2048, "cuda_graphs": False}
    (prompt,) = random_prompts(3, (6000,))
    exact, codes, decoded = (
        LLM(source(**shape), kv_cache_dtype=formats, max_workspace_mib=budget, **given)
        for formats, budget in (("auto", 256), (name, 0.001), (name, 256))
    )
    monkeypatch.setattr(PageExpander, "groups", counted)
    wanted, direct = (prompt_logprobs(llm, prompt) for llm in (exact, codes))
    assert not pieces
    found = prompt_logprobs(decoded, prompt)
    assert max(pieces) >= 6000
    assert (found - direct).abs().mean() < (direct - wanted).abs().mean() / 2


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_latent_rows_are_rounded_in_every_form(latent_model: str, name: str) -> None:
    """Expanded where they are new, expanded from pages, and absorbed."""
    prompt = random_prompts(8, (5, 150))[1]
    plain = LLM(latent_model, device="cpu")
    given: Any = {"device": "cpu", "kv_cache_dtype": name, "max_num_seqs": 4}
    whole = prompt_logprobs(LLM(latent_model, **given), prompt)
    for chunk in (40, 4):
        llm = LLM(latent_model, max_num_batched_tokens=chunk, **given)
        torch.testing.assert_close(prompt_logprobs(llm, prompt), whole, rtol=0, atol=2e-4)
    off = (whole - prompt_logprobs(plain, prompt)).abs().mean()
    assert 2e-4 < off < UNITS[name] * 2**-9 * whole.abs().mean()


def test_a_latent_row_has_one_format(latent_model: str) -> None:
    with pytest.raises(ValueError, match="one format, got int8 for keys and fp8 for values"):
        LLM(latent_model, device="cpu", kv_cache_dtype="int8/fp8")
    formats = parse_cache_formats("int8")
    layer = LayerShape(1, 48, 32, torch.float16, formats, is_latent=True)
    (cache,) = allocate_layers([layer], 3, 16, torch.device("cpu"))
    assert cache.k.nbytes + cache.k_scales.nbytes == 3 * page_bytes([layer], 16)


def test_dealt_pages_are_plain() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype 'int8' and context_parallel 2 cannot"):
        EngineConfig(kv_cache_dtype="int8", context_parallel=2)
    assert EngineConfig(kv_cache_dtype="int8", tensor_parallel=2).cache_formats == ("int8", "int8")


def test_heads_that_blocks_do_not_divide() -> None:
    with pytest.raises(ValueError, match="blocks of 32, got head_dim with 16 columns"):
        LLM(source(), device="cpu", kv_cache_dtype="auto/q8_0")


def test_16_bits_on_a_cpu_are_said_to_be_slow(caplog: pytest.LogCaptureFixture) -> None:
    LLM(source(), device="cpu", dtype="float32")
    LLM(source(), device="cpu")
    assert not caplog.records
    LLM(source(), device="cpu", dtype="bfloat16")
    assert [record.getMessage() for record in caplog.records] == [
        "dtype bfloat16 on a CPU takes about twice the time of float32"
    ]


def test_prompts_that_see_many_keys_decode_them_and_have_no_graph() -> None:
    def run_of(start: int, num_tokens: int) -> Any:
        return SimpleNamespace(
            start=start, num_tokens=num_tokens, num_drafts=0, scores_prompt=False
        )

    llm = as_on_gpu(LLM(source(), device="cpu", kv_cache_dtype="int8"))
    runner = llm.engine._launcher._built.runner
    assert runner._prompt_key([run_of(20_000, 60)]) == PromptKey(64)
    runner._expands = True  # as on Hopper
    assert runner._prompt_key([run_of(0, 60)]) == PromptKey(64)
    assert runner._prompt_key([run_of(20_000, 60)]) is None
