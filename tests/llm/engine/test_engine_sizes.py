"""Sizes that an engine chooses: defaults, what of a GPU's memory is left for the cache, shapes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import PAGE_BYTES, pages, tiny

from anabranch.llm.engine import build, limits
from anabranch.llm.engine.admission import encode_prompt
from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.engine.limits import Limits
from anabranch.llm.engine.request import CompletionOutput
from anabranch.llm.engine.stats import EngineStats, SpeculativeStats
from anabranch.llm.runner.graphs import GraphKey, prompt_sizes
from anabranch.llm.runner.kv_cache import LayerShape
from anabranch.llm.runner.step_layout import Scorer
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sequences.sequence import Origin
from anabranch.llm.speculative.draft_chain import DraftChain, TreeChain, chain_keys

GIB = 1024**3
DEFAULTS: dict[type[Any], dict[str, Any]] = {  # those that are numbers or flags
    EngineConfig: {
        "page_size": 16,
        "gpu_memory_utilization": 0.9,
        "prefix_caching": True,
        "cuda_graphs": True,
        "join_projections": True,
        "fused_merge": True,
        "max_workspace_mib": 256,
        "tensor_parallel": 1,
        "context_parallel": 1,
    },
    SpeculativeConfig: {
        "num_drafts": 4,
        "tree_width": 1,
        "adaptive": True,
        "max_ngram": 4,
        "min_ngram": 2,
    },
    SamplingParams: {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "skip_special_tokens": True,
    },
}


@pytest.mark.parametrize("made", DEFAULTS, ids=lambda made: made.__name__)
def test_defaults(made: type[Any]) -> None:
    known = {each.name: each.default for each in fields(made) if each.default is not MISSING}
    found = {name: value for name, value in known.items() if isinstance(value, int | float)}
    assert found == DEFAULTS[made]


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"num_drafts": 32}, {"num_drafts": 33}),
        ({"num_drafts": 1}, {"num_drafts": 0}),
        ({"tree_width": 16}, {"tree_width": 17}),
        ({"tree_width": 1}, {"tree_width": 0}),
        ({"min_ngram": 4, "max_ngram": 4}, {"min_ngram": 5, "max_ngram": 4}),
        ({"min_ngram": 1}, {"min_ngram": 0}),
    ],
)
def test_bounds_of_drafts(given: dict[str, Any], refused: dict[str, Any]) -> None:
    SpeculativeConfig(**given)
    with pytest.raises(ValueError, match="must be from"):
        SpeculativeConfig(**refused)


TAKEN: list[dict[str, Any]] = [
    {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "page_size": 1},
    {"gpu_memory_utilization": 1},
    {"gpu_memory_utilization": 1e-9},
    {"kv_cache_gib": 1e-9},
    {"max_workspace_mib": 1e-9},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"dtype": "auto"},
    {"dtype": "bfloat16"},
    {"activations": "float32"},
    {"generation_config": "none"},
    {"cascade": True},
    {"cascade": False},
    {"cascade": False, "prefix_caching": False},
    {"sparse": {"method": "pages"}, "tensor_parallel": 2},
    {"cascade": False, "context_parallel": 2},
    {"speculative": {"tree_width": 1}, "tensor_parallel": 2},
    {"speculative": {"tree_width": 2}},
    {"kv_cache_dtype": "q8_0", "tensor_parallel": 2},
    {"speculative": "off", "sparse": {"method": "pages"}},
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_model_len": 0}, "max_model_len must be at least 1, got 0"),
    ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
    ({"page_size": 0}, "page_size must be at least 1, got 0"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0 and at most 1"),
    ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be above 0 and at most 1"),
    ({"kv_cache_gib": 0}, "kv_cache_gib must be above 0, got 0"),
    ({"max_workspace_mib": 0}, "max_workspace_mib must be above 0, got 0"),
    ({"seed": 2**63}, "seed must have 64 bits"),
    ({"seed": -(2**63) - 1}, "seed must have 64 bits"),
    ({"dtype": "int8"}, "dtype must be one of auto, float16, bfloat16, float32, got 'int8'"),
    ({"activations": "int4"}, "activations must be one of int8, float32, got 'int4'"),
    ({"generation_config": "x"}, "generation_config must be 'auto' or 'none', got 'x'"),
    ({"tensor_parallel": 0}, "tensor_parallel must be an integer of at least 1, got 0"),
    ({"tensor_parallel": 1.0}, "tensor_parallel must be an integer of at least 1, got 1.0"),
    ({"context_parallel": True}, "context_parallel must be an integer of at least 1, got True"),
    ({"tensor_parallel": 2, "context_parallel": 2}, "2 and context_parallel 2 cannot be combined"),
    ({"kv_cache_dtype": "q8_0", "context_parallel": 2}, "dealt pages hold plain keys"),
    (
        {"speculative": {"tree_width": 2}, "tensor_parallel": 2},
        "tree_width 2 needs one rank, got 2",
    ),
    ({"speculative": "ngram", "sparse": {"method": "pages"}}, "use one of the two"),
    ({"sparse": {"method": "pages"}, "context_parallel": 2}, "sparse needs whole pages"),
    ({"speculative": 3}, "speculative must be a method, its options or SpeculativeConfig, got 3"),
    ({"speculative": {"a": 1, "num_drafts": 2}}, "unknown options of speculative: a$"),
    ({"speculative": "draft"}, "method 'draft' needs model, got None"),
    ({"speculative": {"model": "m"}}, "method 'ngram' takes no model, got 'm'"),
    ({"speculative": {"num_drafts": True}}, "num_drafts must be an integer, got True"),
    ({"speculative": {"num_drafts": 2.0}}, "num_drafts must be an integer, got 2.0"),
    ({"speculative": {"tree_width": 2, "num_drafts": 64}}, "num_drafts must be from 1 to 63"),
    (
        {"speculative": {"tree_width": 2, "scorer": Scorer.BATCH_EXPANSION}},
        "tree_width 2 needs scorer",
    ),
]


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_options_that_are_taken(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    assert config.num_ranks == options.get("tensor_parallel", options.get("context_parallel", 1))
    assert config.deals_context == ("context_parallel" in options)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_options_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("name", "seen", "found"),
    [
        (None, False, "cpu"),
        (None, True, "cuda:3"),
        ("cuda", True, "cuda:3"),
        ("cuda:1", True, "cuda:1"),
        ("cpu", True, "cpu"),
    ],
)
def test_devices(name: str | None, seen: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert EngineConfig(device=name).resolve_device() == torch.device(found)


@pytest.mark.parametrize(
    ("name", "said"), [("tpu", "cpu or cuda, got 'tpu'"), ("cuda:1", "no GPU")]
)
def test_devices_that_are_not_there(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=said):
        EngineConfig(device=name).resolve_device()


@pytest.mark.parametrize("adaptive", [True, False, None])
@pytest.mark.parametrize("kind", [None, DraftChain, TreeChain])
def test_graphs_of_every_number_of_drafts(kind: Any, adaptive: bool | None) -> None:
    """What is captured for a target and its draft model; a tree has at most eight levels."""
    captured: dict[str, Any] = {}

    def noted(name: str) -> Any:
        return lambda keys, *_, **options: captured.update({name: keys, f"{name}s": options})

    graphs = SimpleNamespace(pool="pool")
    choice = SimpleNamespace(keys=lambda keys: keys)
    runner = SimpleNamespace(
        capture=noted("step"), capture_prompts=noted("prompt"), graphs=graphs, choice=choice
    )
    chain = None
    if kind is not None:
        chain = kind.__new__(kind)
        chain.capture = noted("chain")
    drafts = None if adaptive is None else SpeculativeConfig(num_drafts=16, adaptive=adaptive)
    config = EngineConfig(speculative=drafts)
    given = cast("list[Any]", [config, Limits(300, 2, 128, 16, 64, 16), runner, chain])
    build._capture(*given, lambda *_: None)  # pyright: ignore[reportPrivateUsage]
    assert {(key.q_len, key.batch) for key in captured["step"]} == {
        (1, 1),
        (1, 2),
        (17, 1),
        (17, 2),
    }
    assert captured["prompt"] == prompt_sizes(128)
    if chain is None:
        assert "chain" not in captured
        return
    most = {TreeChain: [1, 2, 4, 8], DraftChain: [1, 2, 4, 8, 16] if adaptive else [16]}[kind]
    assert captured["chain"] == chain_keys(most, [1, 2])
    assert captured["chains"] == {"pool": "pool"}


def test_a_cpu_runs_smaller_steps() -> None:
    found = tiny(max_num_seqs=None).engine.limits
    assert (found.max_num_seqs, found.max_num_tokens, found.page_size) == (16, 1024, 16)
    assert found.num_pages == 16 * -(-found.max_model_len // 16)  # all that sequences can fill


@pytest.mark.parametrize("sparse", [None, {"method": "pages"}])
def test_memory_is_used_to_the_last_page(sparse: Any) -> None:
    """With sparse decoding a page also has the least and the greatest of its keys."""
    bounds = 0 if sparse is None else 2 * (2 * 2 * 16 * 4)  # layers, heads, dims, bytes
    found = [
        tiny(kv_cache_gib=pages(1, 5 * (PAGE_BYTES + bounds) + more), sparse=sparse).engine.limits
        for more in (0, -1)
    ]
    assert [each.num_pages for each in found] == [5, 4]
    assert [each.max_model_len for each in found] == [80, 64]


@pytest.mark.parametrize("given", [None, 0.25])
def test_cache_of_a_cpu(given: float | None) -> None:
    config = EngineConfig(device="cpu", kv_cache_gib=given)
    found = limits._cache_bytes(config, torch.device("cpu"), 0)  # pyright: ignore[reportPrivateUsage]
    assert found == (given or 1.0) * GIB


def test_a_gpus_cache_is_what_nobody_else_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, 0.9 of them ours: 10 are others' or weights, 3 activations, 2 logits, 1 graphs."""
    cuda = {
        "mem_get_info": (65 * GIB, 80 * GIB),  # free, total
        "memory_reserved": 9 * GIB,  # of which 5 are kept and not used
        "memory_allocated": 4 * GIB,
        "max_memory_allocated": 7 * GIB,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    config, device = EngineConfig(device="cuda"), torch.device("cuda")
    budget = limits._cache_bytes(config, device, 2 * GIB)  # pyright: ignore[reportPrivateUsage]
    assert budget == int(80 * GIB * 0.9) - (80 - 65 - 5 + 3 + 2 + 1) * GIB
    whole = budget + 2 * GIB
    assert limits._cache_bytes(config, device, whole - 1) == 1  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match=r"take 13.0 GiB of 80.0"):
        limits._cache_bytes(config, device, whole)  # pyright: ignore[reportPrivateUsage]


class OnGpu:
    """Sizes of an engine on a GPU of so many bytes for the cache, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **shape: Any) -> None:
        self.layer = LayerShape(**{"num_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16} | shape)
        self.profiled = list[int]()
        self.kept_free = list[int]()
        self.cache_bytes = GIB
        monkeypatch.setattr(limits, "_profile", self._profile)
        monkeypatch.setattr(limits, "_cache_bytes", self._cache_bytes)

    def _profile(self, models: Any, num_tokens: int, *given: Any) -> Any:
        self.profiled.append(num_tokens)
        return {"layer": self.layer}, {"layer": self.layer} if len(models) > 1 else {}

    def _cache_bytes(self, config: EngineConfig, device: torch.device, logits: int) -> int:
        self.kept_free.append(logits)
        return self.cache_bytes

    def size(self, *positions: int | None, **options: Any) -> Limits:
        models = [
            SimpleNamespace(
                model=None,
                name=f"model {place}",
                config=SimpleNamespace(
                    get_text_config=lambda most=most: SimpleNamespace(
                        vocab_size=100, max_position_embeddings=most
                    )
                ),
            )
            for place, most in enumerate(positions)
        ]
        target, draft = cast("list[Any]", [*models, None])[:2]
        config = EngineConfig(device="cuda", **options)
        device = torch.device("cuda")
        return limits.size(config, target, draft, device, lambda *_: None)[0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    return OnGpu(monkeypatch, dtype=torch.float16)


def test_a_gpu_runs_larger_steps(on_gpu: OnGpu) -> None:
    page = 16 * 2 * (16 + 16) * 2  # tokens, heads, dims, bytes
    assert on_gpu.size(4096) == Limits(4096, 64, 8192, 16, 256 * 64, 0)
    on_gpu.cache_bytes = 300 * page + page - 1
    assert on_gpu.size(4096) == Limits(4096, 64, 8192, 16, 300, 0)
    on_gpu.cache_bytes = 200 * page
    assert on_gpu.size(4096).max_model_len == 200 * 16
    with pytest.raises(ValueError, match="a sequence of max_model_len 4096 needs"):
        on_gpu.size(4096, max_model_len=4096)
    assert on_gpu.size(4096, max_model_len=3200).num_pages == 200
    on_gpu.cache_bytes = page - 1
    with pytest.raises(ValueError, match="more memory"):
        on_gpu.size(4096)
    assert on_gpu.profiled == [4096] * 4 + [3200, 4096]


def test_contexts_are_the_shortest_of_the_models(on_gpu: OnGpu) -> None:
    drafts = SpeculativeConfig(method="draft", model="small", num_drafts=3, tree_width=2)
    assert on_gpu.size(None).max_model_len == 2048
    assert on_gpu.size(512, 256, speculative=drafts).max_model_len == 256
    with pytest.raises(ValueError, match="max_model_len 257 exceeds model 1's 256"):
        on_gpu.size(512, 256, speculative=drafts, max_model_len=257)
    with pytest.raises(ValueError, match="every sequence runs a token a step"):
        on_gpu.size(512, max_num_seqs=9, max_num_batched_tokens=8)
    assert on_gpu.size(512, max_num_seqs=8, max_num_batched_tokens=8).max_num_tokens == 8
    # float32 logits: 8 copies of what is sampled and drafted, 2 of what is scored
    sampled, drawn = 64 * (1 + 3) * 8, 64 * 2 * 8
    assert on_gpu.kept_free[1] == 100 * 4 * (sampled + drawn + 512 * 2)
    assert on_gpu.kept_free[-1] == 100 * 4 * (8 * 8 + 8 * 2)


def test_latent_rows_need_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = OnGpu(monkeypatch, num_kv_heads=1, dtype=torch.float16, is_latent=True)
    plain = 100 * 4 * (64 * 8 + 512 * 2)
    on_gpu.size(4096)
    on_gpu.size(4096, max_workspace_mib=3)
    assert on_gpu.kept_free == [plain + 256 * 2**20, plain + 3 * 2**20]
    with pytest.raises(ValueError, match="context_parallel 2: latent rows"):
        on_gpu.size(4096, context_parallel=2)


def test_pages_that_are_dealt_out_count_the_tokens_of_all_ranks(on_gpu: OnGpu) -> None:
    found = on_gpu.size(4096, context_parallel=2)
    assert (found.page_size, found.num_pages) == (32, 128 * 64)
    assert Limits(100, 1, 1, 16, 64, 0).table_width == 7
    assert Limits(96, 1, 1, 16, 64, 0).table_width == 6
    assert Limits(96, 1, 1, 16, 64, 1).table_width == 7


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(num_drafts=3)])
def test_logits_are_kept_free(
    speculative: SpeculativeConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight float32 copies for every token that is sampled, two for those that are scored."""
    seen, real = list[int](), limits._cache_bytes  # pyright: ignore[reportPrivateUsage]

    def spy(config: EngineConfig, device: torch.device, logits: int) -> int:
        seen.append(logits)
        return real(config, device, logits)

    monkeypatch.setattr(limits, "_cache_bytes", spy)
    llm = tiny(max_num_seqs=3, max_num_batched_tokens=600, speculative=speculative)
    vocab, rows = llm.engine.vocab_size, 3 * (4 if speculative else 1)
    assert seen == [vocab * 4 * (rows * 8 + 512 * 2)]


def test_shapes_to_warm_up_cover_few_and_many() -> None:
    sizes = Limits(300, 12, 1024, 16, 64, 4)
    found = build._shapes(sizes)  # pyright: ignore[reportPrivateUsage]
    assert {key.q_len for key in found} == {1, 2, 5, 16, 64, 300, 512}
    assert {key.batch for key in found} == {1, 8, 12}
    assert GraphKey(64, 12) in found and GraphKey(512, 1) in found
    assert GraphKey(512, 8) not in found and GraphKey(300, 8) not in found
    exact = build._shapes(Limits(300, 2, 128, 16, 64, 0))  # pyright: ignore[reportPrivateUsage]
    assert GraphKey(64, 2) in exact and GraphKey(128, 1) in exact
    assert max(key.num_tokens for key in exact) == 128


def test_models_of_a_billion_weights_are_compiled() -> None:
    def compiles(weights: int, device: str, given: bool | None = None) -> bool:
        model = SimpleNamespace(num_parameters=lambda: weights)
        config = EngineConfig(device=device, compile=given)
        target = cast("Any", SimpleNamespace(model=model))
        return build._compiles(config, target, torch.device(device))  # pyright: ignore[reportPrivateUsage]

    assert compiles(10**9, "cuda") and not compiles(10**9 - 1, "cuda")
    assert not compiles(10**9, "cpu")
    assert compiles(1, "cpu", True) and not compiles(10**9, "cuda", False)


def test_draft_models_must_number_tokens_alike() -> None:
    def loaded(vocab: dict[str, int] | None, size: int = 3) -> Any:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=size))
        tokenizer = None if vocab is None else SimpleNamespace(get_vocab=lambda: vocab)
        return SimpleNamespace(name="m", config=config, tokenizer=tokenizer)

    check = build._check_vocabularies  # pyright: ignore[reportPrivateUsage]
    check(loaded({"a": 0, "b": 1}), loaded({"b": 1, "a": 0, "c": 2}))
    check(loaded(None), loaded({"a": 0}))
    check(loaded({"a": 0}), loaded(None))
    with pytest.raises(ValueError, match="number the token 'b' differently: 2 and 1"):
        check(loaded({"a": 0, "b": 1}), loaded({"a": 0, "b": 2}))
    with pytest.raises(ValueError, match="vocabulary of 4"):
        check(loaded(None), loaded(None, 4))


@pytest.mark.parametrize(
    ("generation", "of_model", "of_tokenizer", "expected"),
    [
        (5, 6, None, {5}),
        ([5, 7], 6, 8, {5, 7, 8}),
        (None, 6, None, {6}),
        (None, None, 0, {0}),
        ([9, 10, -1], None, 10, {9}),  # 10 is not in the vocabulary
        (None, None, None, set()),
    ],
)
def test_tokens_that_end_a_text(
    generation: Any, of_model: Any, of_tokenizer: int | None, expected: set[int]
) -> None:
    text = SimpleNamespace(vocab_size=10, eos_token_id=of_model)
    target = SimpleNamespace(
        model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation)),
        config=SimpleNamespace(get_text_config=lambda: text),
        tokenizer=SimpleNamespace(eos_token_id=of_tokenizer),
    )
    assert build.eos_ids(cast("Any", SimpleNamespace(target=target))) == expected


def test_verifications_are_steps_with_drafts() -> None:
    """Steps 1 and 3 emitted several tokens, step 2 rejected its drafts, step 4 had none."""
    origins = [Origin.ACCEPTED, Origin.SAMPLED, Origin.CORRECTED, Origin.ACCEPTED]
    origins += [Origin.CORRECTED, Origin.SAMPLED]
    output = CompletionOutput(0, "", [7] * 6, origins=list(origins), steps=[1, 1, 2, 3, 3, 4])
    assert output.verifications == [2, 1, 2]


def test_counts_of_drafts() -> None:
    stats = SpeculativeStats()
    assert (stats.acceptance_rate, stats.system_efficiency, stats.acceptance_length) == (0, 0, 0)
    assert stats.acceptance_by_position == []
    stats.count(1, 1, 2)
    rates = stats.acceptance_rate, stats.system_efficiency, stats.acceptance_length
    assert rates == (1, 2 / 3, 2)
    stats.count(2, 1, 2)
    stats.count(4, 2, 4, deepest=3)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 4)
    assert (stats.num_emitted_tokens, stats.num_max_tokens) == (2 + 2 + 3, 3 + 3 + 5)
    assert (stats.drafted_at, stats.accepted_at) == ([3, 2, 1, 0], [3, 1, 0, 0])
    assert stats.acceptance_by_position == [1, 1 / 2, 0, 0]
    rates = stats.acceptance_rate, stats.system_efficiency, stats.acceptance_length
    assert rates == (4 / 7, 7 / 11, 7 / 3)


def test_counts_of_an_engine() -> None:
    stats = EngineStats()
    numbers = [each.name for each in fields(stats) if each.name.startswith("num_")]
    assert len(numbers) == 8 and not any(getattr(stats, name) for name in numbers)
    for counter, total in ((5, 5), (5, 5), (2**32 - 1, 2**32 - 1), (4, 2**32 + 4)):
        stats.count_saturated(counter)
        assert stats.num_saturated == total
    stats.add_times({"model": 1.5})
    stats.add_times({"model": 2.0, "sampling": 1.0})
    assert stats.stage_ms == {"model": 3.5, "sampling": 1.0}


def test_prompts_at_their_bounds() -> None:
    def ids(prompt: Any, **options: Any) -> list[int]:
        given = {"tokenizer": None, "vocab_size": 9, "max_model_len": 4}
        return encode_prompt(prompt, SamplingParams(**options), **given)

    assert ids([0, 8, 1]) == [0, 8, 1]
    assert ids([1, 2, 3, 4, 5], truncate_prompt_tokens=2) == [4, 5]
    for wrong, said in (
        ([9], "token id 9 is not in the vocabulary of 9"),
        ([1, -1], "token id -1 is not"),
        ([1, 2, 3, 4], "has 4 tokens; .* allows 3"),
        ([], "the prompt is empty"),
        ([True], "holds integers, got True"),
        ([1.0], "holds integers, got 1.0"),
        (bytearray(b"a"), "a prompt is text or a list of token ids, got bytearray"),
        (7, "a prompt is text or a list of token ids, got int"),
        ("text", "this model has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=said):
            ids(wrong)


@pytest.mark.parametrize("drafts", [False, True])
def test_stages_are_named_after_what_is_in_a_step(drafts: bool) -> None:
    """Prompts have no drafts; every step after them has some where a token repeats itself."""
    speculative = SpeculativeConfig(min_ngram=1, adaptive=False) if drafts else None
    llm = tiny(speculative=speculative)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[5] * 9], params)
    assert set(llm.stats.stage_ms) - {"proposal"} == {"model", "sampling"}
    assert set(llm.stats.host_ms) == {"waiting"}
    if drafts:
        llm.generate([[5] * 9], SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={5: 100}))
        assert {"scoring", "verification"} <= set(llm.stats.stage_ms)


def test_steps_that_decode_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beside a prompt too; prompts alone say nothing of drafts."""
    engine, seen = tiny(speculative=SpeculativeConfig(min_ngram=1)).engine, list[int]()
    observe = lambda batch, *_, **__: seen.append(batch)  # noqa: E731
    monkeypatch.setattr(type(engine.adaptive), "observe", lambda _, *given, **more: observe(*given))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("first", [5, 6, 7], params)
    engine.step()
    assert not seen
    engine.add_request("second", [8, 9, 8, 7], params)
    engine.step()
    assert len(seen) == 1
    while engine.has_work:
        engine.step()
