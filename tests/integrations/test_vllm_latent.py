"""The vLLM backend of latent caches without vLLM: its layers, its batches, and what it refuses."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import assert_right
from fake_vllm import OURS, common_metadata, install

from anabranch import AttentionState, LatentKV
from anabranch.compositions import sections

HEADS, RANK, ROPE, PAGE, NUM_PAGES, SCALE = 5, 16, 8, 4, 32, 0.3
CAUSAL = {"causal": True, "window": None, "softcap": None, "sinks": None, "tree_mask": None}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, "0.26.0", use_mla=True)
    return import_module(f"{OURS}.latent_backend")


def make_layer(backend: Any, **change: Any) -> Any:
    """As MLAAttention makes one, by keywords."""
    given: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": RANK + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "kv_lora_rank": RANK,
        "indexer": None,
    }
    return backend.AnabranchLatentAttention(**{**given, **change})


def make_builder(
    backend: Any, device: torch.device = CUDA, *, num_drafts: int = 0, num_tokens: int = 512
) -> Any:
    config = SimpleNamespace(
        num_drafts=num_drafts,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=num_tokens),
    )
    return backend.AnabranchLatentBackend.get_builder_cls()(None, [], config, device)


def make_cache(kv_cache_dtype: str = "auto") -> torch.Tensor:
    cache = torch.randn(NUM_PAGES, PAGE, RANK + ROPE)
    if kv_cache_dtype == "auto":
        return cache
    return cache.to(torch.float8_e4m3fn).view(torch.uint8)


def make_table(num_seqs: int, width: int = 5) -> torch.Tensor:
    return torch.randperm(NUM_PAGES)[: num_seqs * width].view(num_seqs, width).int()


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ([1, 1, 1], [1, 9, 20]),  # decodes
        ([3, 1, 2], [7, 9, 20]),  # verification with fewer drafts in some
        ([1, 3, 5, 8], [9, 6, 11, 8]),  # with short prompts
        ([1, 5, 0, 0], [3, 5, 0, 0]),  # with padding
        ([1, 1], [0, 6]),  # decode context parallel: no keys on this rank
    ],
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_layer_attends_to_the_rows_it_wrote(
    backend: Any, q_lens: list[int], k_lens: list[int], kv_cache_dtype: str
) -> None:
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5))
    impl = make_layer(backend, kv_cache_dtype=kv_cache_dtype)
    cache, table = make_cache(kv_cache_dtype), make_table(len(q_lens))
    common = common_metadata(q_lens, k_lens, table)
    slots = torch.cat([
        table[seq][at // PAGE].long() * PAGE + at % PAGE
        for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True))
        for at in [torch.arange(max(k_len - q_len, 0), k_len)]
    ])  # fmt: skip
    latent, rotary = torch.randn(len(slots), RANK), torch.randn(len(slots), 1, ROPE)
    written = (latent, rotary, cache, slots, kv_cache_dtype, layer._k_scale)
    impl.do_kv_cache_update(*written)
    rows = torch.cat([latent, rotary[:, 0]], dim=-1)
    is_fp8 = kv_cache_dtype == "fp8"
    codes = cache.view(torch.float8_e4m3fn) if is_fp8 else cache
    kept = codes.flatten(0, 1).float()[slots] * (0.5 if is_fp8 else 1.0)
    torch.testing.assert_close(kept, rows, rtol=2**-4 if is_fp8 else 0, atol=2**-10 * is_fp8)
    q = torch.randn(sum(q_lens), HEADS, RANK + ROPE)
    batch = make_builder(backend, num_drafts=2).build(0, common)
    assert impl.forward_mqa((q[..., :RANK], q[..., RANK:]), codes, batch, layer)[1] is None
    impl.need_to_return_lse_for_decode = True
    state = impl.forward_mqa(q, codes, batch, layer)
    scales = layer._k_scale if is_fp8 else None
    keys = LatentKV(codes, table, common.seq_lens, RANK, scales, torch.float32)
    options = {**CAUSAL, "cu_seqlens_q": common.query_start_loc, "scale": SCALE}
    assert_right(AttentionState(*state), q, keys, options)
    assert not impl.supports_quant_query_input


def test_padding_is_not_written(backend: Any) -> None:
    latent, rotary, cache = torch.randn(4, RANK), torch.randn(4, 1, ROPE), make_cache()
    expected, slots = cache.clone(), torch.tensor([5, -1])  # two tokens have none
    make_layer(backend).do_kv_cache_update(latent, rotary, cache, slots, "auto", torch.ones(()))
    expected[5 // PAGE, 5 % PAGE] = torch.cat([latent[0], rotary[0, 0]])
    assert torch.equal(cache, expected)


def test_memory_is_measured_without_a_cache(backend: Any) -> None:
    rows = (torch.randn(2, RANK), torch.randn(2, 1, ROPE), torch.empty(0), torch.arange(2))
    make_layer(backend).do_kv_cache_update(*rows, "auto", torch.ones(()))


def test_plans_are_shared_by_the_layers_of_a_pass(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make_plan(q: torch.Tensor, keys: Any, **options: Any) -> Any:
        made.append(keys.view().k.format.name)
        return original(q, keys, **options)

    original = sections.make_plan
    monkeypatch.setattr(sections, "make_plan", make_plan)
    table = make_table(3)
    batch = make_builder(backend).build(0, common_metadata([1, 1, 6], [4, 9, 6], table))
    layer, q = SimpleNamespace(_k_scale=torch.tensor(0.5)), torch.randn(8, HEADS, RANK + ROPE)
    impls = [make_layer(backend, kv_cache_dtype=name) for name in ("auto", "fp8", "auto")]
    for impl in impls:
        cache = make_cache(impl.kv_cache_dtype)
        impl.forward_mqa(q, cache, batch, layer)
    assert made == ["plain"] * 2 + ["fp8_tensor"] * 2, "one for each section and format"
    impls[0].forward_mqa(q, make_cache(), batch, layer)
    assert made[4:] == ["plain"] * 2, "a layer that comes again begins another pass"


def test_short_prompts_are_a_section_of_their_own(backend: Any) -> None:
    q_lens = [3, 1, 128, 7, 129]
    common = common_metadata(q_lens, [400] * 5, torch.zeros(5, 100, dtype=torch.int32))
    metadata = make_builder(backend, num_drafts=2).build(0, common)
    assert metadata.num_decodes == 4, "longer queries than 128 are vLLM's"
    decode = metadata.decode
    assert [bounds.seqs for bounds in decode.batch.bounds] == [slice(0, 2), slice(2, 4)]
    assert [bounds.tokens for bounds in decode.batch.bounds] == [slice(0, 4), slice(4, 139)]
    assert torch.equal(decode.seq_lens, common.seq_lens[:4])
    assert make_builder(backend, CPU, num_tokens=512).build(0, common).num_decodes == 5
    uniform = common_metadata([3, 3], [400, 9], torch.zeros(2, 100, dtype=torch.int32))
    (bounds,) = make_builder(backend, num_drafts=2).build(0, uniform).decode.batch.bounds
    assert (bounds.seqs, bounds.tokens) == (slice(0, 2), slice(0, 6))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_size": 192}, "head_size must be one of 24, 320, 576, got 192"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype .* got 'fp8_ds_mla'"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype must be the model's .* got 'bfloat16'"),
        ({"sliding_window": 128}, "sliding_window=128"),
    ],
)
def test_layers_are_refused_when_made(backend: Any, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_layer(backend, **change)


def test_what_is_declared(backend: Any) -> None:
    ours = backend.AnabranchLatentBackend
    assert ours.get_name() == "CUSTOM"
    assert ours.get_preferred_block_size(16) == 64
    assert {"auto", "bfloat16", "fp8", "fp8_e4m3"} < {*ours.supported_kv_cache_dtypes}
    fits = (576, torch.bfloat16, "fp8")
    assert ours.supports_combination(*fits, None, use_mla=True) is None
    assert "got 300" in ours.supports_combination(300, *fits[1:], None, use_mla=True)
    assert ours.get_impl_cls().can_return_lse_for_decode
    assert ours.get_builder_cls()._cudagraph_support.name == "UNIFORM_BATCH"
