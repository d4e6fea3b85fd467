"""The vLLM backend without vLLM: its batches, its layers, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import OURS, REGISTERED, Backends, common_metadata, install
from hypothesis import given
from hypothesis import strategies as st
from tolerance import assert_close

from anabranch import PagedKV, RaggedKV, attend, reference
from anabranch.compositions import sections
from anabranch.integrations.vllm import register
from anabranch.integrations.vllm.batch_metadata import BatchMetadata, read_batch
from anabranch.integrations.vllm.cache_pages import CachePages, CacheScales
from anabranch.integrations.vllm.compat import DeclaredCache, check_version, combine_across_ranks
from anabranch.integrations.vllm.context_ranks import ContextRanks, attend_across_ranks
from anabranch.integrations.vllm.layer_attention import attend_batch
from anabranch.integrations.vllm.layer_options import LayerOptions, refusal
from anabranch.integrations.vllm.query_sections import find_bounds
from anabranch.kernels.hopper_config import select_tiles
from anabranch.keys.formats import FP8_TENSOR, encode
from anabranch.state import AttentionState, merge_stacked

HEADS, KV_HEADS, DIM, PAGE, NUM_PAGES = 6, 2, 16, 4, 64
PLAIN = LayerOptions(scale=0.3, window=None, softcap=None, sinks=None, reads_other_layer=False)


def make_pages(
    layout: str = "NHD", num_kv_heads: int = KV_HEADS, *, fp8: bool = False
) -> CachePages:
    """A cache as vLLM has it, [pages, kv heads, keys, 2 * dim], in either order of memory."""
    if layout == "HND":
        cache = torch.randn(NUM_PAGES, num_kv_heads, PAGE, 2 * DIM)
    else:
        cache = torch.randn(NUM_PAGES, PAGE, num_kv_heads, 2 * DIM).transpose(1, 2)
    if not fp8:
        return CachePages(cache, DIM)
    scales = CacheScales(torch.tensor(0.25), torch.tensor(2.0), torch.float32)
    return CachePages(cache.to(torch.float8_e4m3fn).view(torch.uint8), DIM, scales)


def make_table(num_seqs: int, width: int = 5) -> torch.Tensor:
    return torch.randperm(NUM_PAGES)[: num_seqs * width].view(num_seqs, width).int()


def slots_of(q_lens: list[int], k_lens: list[int], table: torch.Tensor) -> torch.Tensor:
    """Where the new keys of every sequence go."""
    slots: list[torch.Tensor] = []
    for seq, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        positions = torch.arange(k_len - q_len, k_len)
        slots.append(table[seq][positions // PAGE].long() * PAGE + positions % PAGE)
    return torch.cat(slots)


def run_layer(
    options: LayerOptions,
    q_lens: list[int],
    k_lens: list[int],
    *,
    layout: str = "NHD",
    pad: int = 0,
    fp8: bool = False,
) -> None:
    """Write and attend as a layer does; the output must be attention over pages."""
    pages, table = make_pages(layout, fp8=fp8), make_table(len(q_lens))
    num_tokens = sum(q_lens)
    q = torch.randn(num_tokens + pad, HEADS, DIM)
    k, v = torch.randn(2, num_tokens + pad, KV_HEADS, DIM)
    slots = slots_of(q_lens, k_lens, table)
    pages.write(k, v, slots)
    if options.reads_other_layer:
        k, v = k + 1, v + 1
    batch = read_batch(common_metadata(q_lens, k_lens, table), decode_tokens=2)
    output = torch.full_like(q, 7.0)
    attend_batch(object(), options, q, k, v, pages, batch, output)
    keys = pages.keys(table, torch.tensor(k_lens, dtype=torch.int32))
    expect: dict[str, Any] = {
        "cu_seqlens_q": batch.query_start_loc,
        "window": options.window,
        "softcap": options.softcap,
        "scale": options.scale,
        "sinks": options.sinks,
    }
    expected = reference.attend(q[:num_tokens], keys, **expect)
    in_one_call = attend(q[:num_tokens], keys, **expect)
    assert_close(output[:num_tokens], expected.out, in_one_call.out)
    assert (output[num_tokens:] == 7.0).all()


@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ([1, 1, 1], [1, 9, 20]),  # decodes
        ([2, 1, 2], [7, 9, 20]),  # verification with fewer drafts in one
        ([1, 2, 5, 8, 3], [9, 6, 11, 8, 3]),  # decodes, a prompt with a past, two without
        ([4, 7], [4, 7]),  # prompts without a past
        ([1, 5, 0, 0], [3, 5, 0, 0]),  # with padding
        ([6, 1], [6, 8]),  # not sorted
    ],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layers_attend_to_pages(
    q_lens: list[int], k_lens: list[int], layout: str, fp8: bool
) -> None:
    """Of fp8 caches the codes, which new keys without a past have too."""
    run_layer(PLAIN, q_lens, k_lens, layout=layout, pad=3, fp8=fp8)


def test_layers_keep_their_options() -> None:
    for options in (
        LayerOptions(0.2, 3, None, None, False),
        LayerOptions(0.2, None, 5.0, torch.randn(HEADS), False),
        LayerOptions(0.2, 3, None, None, True),
        LayerOptions(0.2, None, None, None, True),
    ):
        run_layer(options, [1, 2, 5, 8, 3], [9, 6, 11, 8, 3])


def test_padding_is_not_written() -> None:
    pages = make_pages()
    before = pages.kv_cache.clone()
    k, v = torch.randn(2, 4, KV_HEADS, DIM)
    pages.write(k, v, torch.tensor([5, -1]))  # two tokens of four have slots, one of them none
    row = torch.cat([k[0], v[0]], dim=-1)
    assert torch.equal(pages.kv_cache[5 // PAGE, :, 5 % PAGE], row)
    before[5 // PAGE, :, 5 % PAGE] = row
    assert torch.equal(pages.kv_cache, before)


lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=7)


@given(lengths, st.integers(1, 3))
def test_bounds_cut_every_batch_once(seqs: list[tuple[int, int]], decode_tokens: int) -> None:
    q_lens = torch.tensor([q for q, _ in seqs])
    k_lens = torch.tensor([q + past for q, past in seqs])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)])
    padded = int(starts[-1]) + 2
    found = find_bounds(starts, k_lens, padded, decode_tokens=decode_tokens)
    seen = [seq for bounds in found for seq in range(len(seqs))[bounds.seqs]]
    assert seen == [*range(len(seqs))]
    tokens = [token for bounds in found for token in range(padded)[bounds.tokens]]
    assert tokens == [*range(padded)]
    for bounds in found:
        assert bounds.tokens.start == starts[bounds.seqs.start]
        pasts = (k_lens - q_lens)[bounds.seqs]
        if bounds.are_new:
            assert not pasts.any()
    if len(found) > 1 and not found[0].are_new:
        kinds = {bool(q > decode_tokens) for q in q_lens[found[0].seqs]}
        assert kinds == {False} or found[1].are_new


def test_a_graph_is_captured_in_one_section() -> None:
    common = common_metadata([1, 8], [1, 8], make_table(2))
    assert len(read_batch(common, decode_tokens=1).bounds) == 2
    (bounds,) = read_batch(common, decode_tokens=None).bounds
    assert (bounds.seqs, bounds.tokens, bounds.are_new) == (slice(0, 2), slice(0, 9), False)


def test_plans_are_shared_by_the_layers_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def make_plan(*args: Any, **options: Any) -> Any:
        made.append(options["window"])
        return original(*args, **options)

    original = sections.make_plan
    monkeypatch.setattr(sections, "make_plan", make_plan)
    pages, table = make_pages(), make_table(3)
    common = common_metadata([1, 6, 4], [4, 9, 4], table)
    batch = read_batch(common, decode_tokens=1)
    full, windowed = PLAIN, LayerOptions(0.3, 3, None, None, False)
    layers = [(object(), full), (object(), windowed), (object(), full)]
    q, output = torch.randn(2, 11, HEADS, DIM)
    k, v = torch.randn(2, 11, KV_HEADS, DIM)

    def forward() -> torch.Tensor:
        for layer, options in layers:
            attend_batch(layer, options, q, k, v, pages, batch, output)
        return output.clone()

    first = forward()
    assert made == [None] * 3 + [3] * 3, "one for each section and window"
    common.seq_lens += torch.tensor([2, 2, 0], dtype=torch.int32)  # as from draft to draft
    second = forward()
    assert len(made) == 12
    keys = PagedKV(pages.k, pages.v, table, common.seq_lens)
    longer = attend(q, keys, cu_seqlens_q=common.query_start_loc, scale=0.3)
    torch.testing.assert_close(second[:7], longer.out[:7])
    assert not torch.equal(first[:7], second[:7])


class Rank:
    """vLLM's coordinator of one rank; all of them share what they were given."""

    def __init__(self, rank: int, queries: list[torch.Tensor]) -> None:
        self.rank_in_group, self.world_size, self.queries = rank, len(queries), queries

    def all_gather(self, q: torch.Tensor, dim: int) -> torch.Tensor:
        assert torch.equal(q, self.queries[self.rank_in_group])
        return torch.cat(self.queries, dim)


class OthersMissingError(Exception):
    pass


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "decode_tokens"),
    [
        ([1, 3, 5, 1], [9, 17, 5, 2], None),  # as in a graph, in one section
        ([1, 6, 5], [9, 17, 5], 1),  # the last is new, those before it are not
        ([6, 7], [6, 7], 2),  # all are new
    ],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(("num_ranks", "interleave"), [(2, 1), (3, 4)])
def test_keys_on_several_ranks(
    num_ranks: int,
    interleave: int,
    fp8: bool,
    q_lens: list[int],
    k_lens: list[int],
    decode_tokens: int | None,
) -> None:
    """As vLLM writes them: a rank's pages hold its share of all keys, the new ones included."""
    num_tokens, num_seqs = sum(q_lens), len(q_lens)
    sinks = torch.randn(num_ranks, HEADS)
    queries = [torch.randn(num_tokens, HEADS, DIM) for _ in range(num_ranks)]
    k, v = torch.randn(2, num_tokens, 1, DIM)
    table = make_table(num_seqs)
    caches = [make_pages(num_kv_heads=1, fp8=fp8) for _ in range(num_ranks)]
    whole, starts = make_pages(num_kv_heads=1, fp8=fp8), torch.tensor([0, *q_lens]).cumsum(0)
    all_k, all_v = list[torch.Tensor](), list[torch.Tensor]()
    for seq, k_len in enumerate(k_lens):
        past = whole.keys(table, torch.tensor(k_lens).int() - torch.tensor(q_lens).int())
        new = slice(int(starts[seq]), int(starts[seq + 1]))
        rows = [
            torch.cat([x.float(), y[new]]) for x, y in zip(past.gather(seq), (k, v), strict=True)
        ]
        all_k.append(rows[0])
        all_v.append(rows[1])
        for rank, pages in enumerate(caches):
            mine = [p for p in range(k_len) if p // interleave % num_ranks == rank]
            local = torch.arange(len(mine))
            slots = table[seq][local // PAGE].long() * PAGE + local % PAGE
            pages.write(rows[0][mine], rows[1][mine], slots)
    states: dict[int, AttentionState] = {}

    def combine(out: Any, lse: Any, group: Rank, return_lse: bool) -> tuple[Any, Any]:
        states[group.rank_in_group] = AttentionState(out, lse)
        if len(states) < num_ranks:
            raise OthersMissingError
        heads = slice(group.rank_in_group * HEADS, (group.rank_in_group + 1) * HEADS)
        stacked = zip(*(states[rank] for rank in range(num_ranks)), strict=True)
        merged = merge_stacked(AttentionState(*map(torch.stack, stacked)))
        return merged.out[:, heads], merged.lse[:, heads]

    def run(rank: int) -> torch.Tensor:
        batch = read_batch(common_metadata(q_lens, k_lens, table), decode_tokens=decode_tokens)
        output = torch.empty(num_tokens + 1, HEADS, DIM)
        options = LayerOptions(0.3, None, None, sinks[rank], False)
        ranks = ContextRanks(Rank(rank, queries), combine, interleave)
        pages = caches[rank]
        attend_across_ranks(object(), options, queries[rank], k, v, pages, batch, output, ranks)
        return output[:num_tokens]

    for rank in range(num_ranks - 1):
        if q_lens != k_lens:
            with pytest.raises(OthersMissingError):
                run(rank)
    keys = RaggedKV(torch.cat(all_k), torch.cat(all_v), torch.tensor([0, *k_lens]).cumsum(0).int())
    for rank in reversed(range(num_ranks)):
        expect: dict[str, Any] = {"cu_seqlens_q": starts.int(), "scale": 0.3, "sinks": sinks[rank]}
        torch.testing.assert_close(run(rank), attend(queries[rank], keys, **expect).out)


@pytest.mark.parametrize("version", ["0.26.0", "0.26.0+cu130", "0.29.1rc2", "0.32.0"])
def test_versions_that_work(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.3", "0.33.0", "1.0.0", "dev", "0.x"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(ValueError, match=f"vLLM {version} is not supported.*0.26 to 0.32"):
        check_version(version)


FITS: dict[str, Any] = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_size": 512}, "head_size .* got 512"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype .* got 'fp8_e5m2'"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype .* got 'bfloat16'"),
        ({"attn_type": "encoder_only"}, "attn_type .* got 'encoder_only'"),
        ({"has_alibi": True}, "alibi_slopes"),
    ],
)
def test_refusals_name_the_value(change: dict[str, Any], named: str) -> None:
    why = refusal(**{**FITS, **change})
    assert why is not None
    assert re.search(named, why)


def test_what_fits_is_not_refused() -> None:
    for change in ({}, {"kv_cache_dtype": "float16"}, {"head_size": 256}, {"head_size": 80}):
        assert refusal(**{**FITS, **change}) is None
    for name in ("fp8", "fp8_e4m3"):
        assert refusal(**{**FITS, "kv_cache_dtype": name}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"causal": torch.tensor([True, False])}, "causal"),
        ({"mm_req_doc_ranges": {0: [(1, 2)]}}, r"\{0: \[\(1, 2\)\]\}"),
    ],
)
def test_batches_that_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_batch(common_metadata([1, 1], [1, 1], make_table(2), **change), decode_tokens=1)


def test_a_window_needs_a_causal_layer() -> None:
    batch = read_batch(common_metadata([1], [4], make_table(1), causal=False), decode_tokens=1)
    options = LayerOptions(0.3, 3, None, None, False)
    q = torch.randn(1, HEADS, DIM)
    with pytest.raises(ValueError, match="window=3"):
        attend_batch(object(), options, q, None, None, make_pages(), batch, q)


def resolve(backend: Backends) -> Any:
    """As vLLM does: the class that a registered path leads to."""
    module, _, name = REGISTERED[backend].rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("chosen", [None, Backends.CUSTOM])
def test_names_stand_for_the_backend_of_the_model(
    monkeypatch: pytest.MonkeyPatch, chosen: Backends | None, use_mla: bool
) -> None:
    install(monkeypatch, "0.32.0", chosen, use_mla=use_mla)
    register()
    ours = "AnabranchLatentBackend" if use_mla else "AnabranchBackend"
    assert resolve(Backends.CUSTOM).__name__ == ours
    theirs = (
        (Backends.CPU_MLA, "OwnCpuLatentBackend")
        if use_mla
        else (Backends.CPU_ATTN, "OwnCpuBackend")
    )
    assert resolve(theirs[0]).__name__ == (theirs[1] if chosen is None else ours)
    with pytest.raises(AttributeError, match="AnyBackend"):
        _ = import_module(f"{OURS}.backend_choice").AnyBackend


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0")
    register()
    register()
    assert {backend.name for backend in REGISTERED} == {"CUSTOM", "CPU_ATTN", "CPU_MLA"}
    backend = resolve(Backends.CUSTOM)
    assert backend.get_name() == "CUSTOM"
    assert backend.supports_combination(512, torch.float16, "auto", None, use_mla=False)
    assert backend.supports_combination(64, torch.float16, "auto", None, use_mla=False) is None


def test_listeners_of_the_compiler_are_told_our_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    jit = import_module("triton.runtime.jit")
    constants = {(0,): select_tiles(128, 128), (1,): 3}
    import_module(f"{OURS}.backend")
    text = jit.serialize_specialization_data("kernel", {}, constants, {}, SimpleNamespace(), "key")
    assert json.loads(text)["constant_vals"] == [str(select_tiles(128, 128)), 3]


def test_an_unsupported_version_is_refused_when_the_backend_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "0.40.1")
    register()
    with pytest.raises(ValueError, match=r"vLLM 0\.40\.1 is not supported"):
        import_module(f"{OURS}.backend")


def test_layers_are_refused_when_made(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    layer = import_module(f"{OURS}.backend").AnabranchAttention
    for options, named in (
        ({"head_size": 300}, "got 300"),
        ({"kv_cache_dtype": "nvfp4"}, "got 'nvfp4'"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"attn_type": "encoder"}, "got 'encoder'"),
    ):
        with pytest.raises(ValueError, match=named):
            layer(**{"num_heads": 8, "head_size": 64, "scale": 0.1, **options})
    monkeypatch.setattr(layer, "dcp_world_size", 2)
    with pytest.raises(ValueError, match=r"2 ranks .* sliding_window=8"):
        layer(num_heads=8, head_size=64, scale=0.1, num_kv_heads=1, sliding_window=8)
    with pytest.raises(ValueError, match=r"2 ranks .* kv_sharing_target_layer_name='layer.3'"):
        layer(8, 64, 0.1, num_kv_heads=1, kv_sharing_target_layer_name="layer.3")
    with pytest.raises(ValueError, match="num_kv_heads=4"):
        layer(num_heads=8, head_size=64, scale=0.1, num_kv_heads=4)


def test_a_layer_from_cache_to_output(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    backend = import_module(f"{OURS}.backend")
    layer = backend.AnabranchAttention(HEADS, DIM, 0.3, KV_HEADS)
    q, output = torch.randn(2, 3, HEADS, DIM)
    k, v = torch.randn(2, 3, KV_HEADS, DIM)
    assert not layer.forward(layer, q, k, v, torch.empty(0), None, output).any()
    layer.do_kv_cache_update(layer, k, v, torch.empty(0), torch.tensor([0, 1, 2]))
    pages, table = make_pages(), make_table(1)
    common = common_metadata([3], [3], table)
    layer.do_kv_cache_update(layer, k, v, pages.kv_cache, slots_of([3], [3], table))
    batch = builder(backend, num_drafts=0).build(0, common)
    assert layer.forward(layer, q, k, v, pages.kv_cache, batch, output) is output
    keys = PagedKV(pages.k, pages.v, table, common.seq_lens)
    expected = attend(q, keys, cu_seqlens_q=common.query_start_loc, scale=0.3)
    torch.testing.assert_close(output, expected.out)
    with pytest.raises(ValueError, match="output_scale"):
        layer.forward(layer, q, k, v, pages.kv_cache, batch, output, torch.ones(1))


def test_a_layer_of_an_fp8_cache_has_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    backend = import_module(f"{OURS}.backend")
    assert {"fp8", "fp8_e4m3"} < {*backend.AnabranchBackend.supported_kv_cache_dtypes}
    impl = backend.AnabranchAttention(HEADS, DIM, 0.3, KV_HEADS, kv_cache_dtype="fp8")
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    cache, table = make_pages(fp8=True).kv_cache, make_table(1)
    k, v = 300 * torch.randn(2, 3, KV_HEADS, DIM)
    common, slots = common_metadata([3], [3], table), slots_of([3], [3], table)
    for scale in (1.0, 4.0):  # vLLM fills them after the first forward pass
        layer._k_scale.fill_(scale)
        layer._v_scale.fill_(2 * scale)
        impl.do_kv_cache_update(layer, k, v, cache, slots)
        written = cache[slots // PAGE, :, slots % PAGE].view(torch.float8_e4m3fn)
        codes = [
            encode(x, FP8_TENSOR, s).codes for x, s in ((k, layer._k_scale), (v, layer._v_scale))
        ]
        assert torch.equal(written.float(), torch.cat(codes, dim=-1).float())
    q, output = torch.randn(2, 3, HEADS, DIM)
    impl.forward(layer, q, k, v, cache, builder(backend, num_drafts=0).build(0, common), output)
    codes_kv = (x.float() for x in written.chunk(2, dim=-1))
    k, v = (x * s for x, s in zip(codes_kv, (layer._k_scale, layer._v_scale), strict=True))
    expected = attend(q, RaggedKV(k, v, common.query_start_loc), **{
        "cu_seqlens_q": common.query_start_loc, "scale": 0.3,
    })  # fmt: skip
    torch.testing.assert_close(output, expected.out)


def builder(
    backend: Any,
    *,
    num_drafts: int,
    rswa_window: int | None = None,
    layers: dict[str, Any] | None = None,
) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(rswa_window=rswa_window),
        num_drafts=num_drafts,
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=48, max_num_seqs=5),
    )
    names, cpu = [*(layers or {})], torch.device("cpu")
    return backend.AnabranchBackend.get_builder_cls()(None, names, config, cpu)


def test_the_builder_keeps_verifications_with_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.32.0")
    backend = import_module(f"{OURS}.backend")
    common = common_metadata([5, 1, 6], [9, 9, 6], make_table(3))
    found: list[BatchMetadata] = [
        builder(backend, num_drafts=4).build(0, common),
        builder(backend, num_drafts=0).build(0, common),
        builder(backend, num_drafts=0).build_for_cudagraph_capture(common),
    ]
    assert [[bounds.seqs.stop for bounds in batch.bounds] for batch in found] == [
        [2, 3], [2, 3], [3],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="rswa_window=128"):
        builder(backend, num_drafts=0, rswa_window=128)


def test_chunks_of_local_attention_are_sequences_of_their_own() -> None:
    """vLLM then counts keys of requests, of which there are fewer, and adds what it needs."""
    common = common_metadata([4, 4, 9], [4, 4, 9], make_table(3))
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound[:2]
    batch = read_batch(common, decode_tokens=1)
    batch.make_virtual_batches_block_table = len  # type: ignore[attr-defined]
    assert [bounds.are_new for bounds in batch.bounds] == [False]


def test_kernels_are_compiled_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    backend = import_module(f"{OURS}.backend")
    windows, ran = {"a": None, "b": 3, "c": None}, []

    class Recording(backend.AnabranchAttention):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            ran.append(self.sliding_window)
            return super().forward(*args, **options)

    layers = {
        name: SimpleNamespace(
            impl=Recording(HEADS, DIM, 0.3, KV_HEADS, sliding_window=window),
            kv_cache=make_pages().kv_cache,
        )
        for name, window in windows.items()
    }
    before = layers["a"].kv_cache.clone()
    common = common_metadata([4, 4], [4, 4], make_table(2))
    batch = builder(backend, num_drafts=0, layers=layers).build_for_cudagraph_capture(common)
    assert ran == [None, 3]
    assert torch.equal(layers["a"].kv_cache, before)
    assert not batch._shared and not batch.plans, "plans for the graph are made inside it"


def test_every_kind_of_section_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where nothing is launched meanwhile: here the calls of a layer are counted."""
    install(monkeypatch, "0.26.0")
    backend = import_module(f"{OURS}.backend")
    module = import_module(f"{OURS}.metadata_builder")
    ahead, kinds = [False], list[tuple[int, int, bool]]()

    @contextmanager
    def compiling() -> Iterator[None]:
        ahead[0] = True
        yield
        ahead[0] = False

    class Recording(backend.AnabranchAttention):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            batch: BatchMetadata = args[5]
            (bounds,) = batch.bounds
            if ahead[0]:
                num_seqs = bounds.seqs.stop
                kinds.append((num_seqs, batch.num_tokens // num_seqs, bounds.are_new))
            return super().forward(*args, **options)

    monkeypatch.setattr(module, "compiling_ahead", compiling)
    impl = Recording(HEADS, DIM, 0.3, KV_HEADS)
    layers = {"a": SimpleNamespace(impl=impl, kv_cache=make_pages().kv_cache)}
    made = builder(backend, num_drafts=2, layers=layers)
    made._is_compiled = False
    common = common_metadata([4, 4], [4, 4], make_table(2, width=12))
    for _ in range(2):
        made.build_for_cudagraph_capture(common)
    assert len(kinds) == len(set(kinds))
    assert {(seqs, 1, False) for seqs in (1, 2, 4, 5)} <= set(kinds)
    assert {(seqs, 3, False) for seqs in (1, 2, 4, 5)} <= set(kinds)
    assert {(1, 48, False), (1, 48, True), (3, 16, True), (5, 8, False)} <= set(kinds)
    assert not any(are_new for _, q_len, are_new in kinds if q_len <= 3)
    assert all(seqs * q_len <= 48 for seqs, q_len, _ in kinds)


def test_the_cache_is_declared_as_vllm_packs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.0")
    assert DeclaredCache.get_kv_cache_shape(9, 16, 2, 64) == (9, 2, 16, 128)
    assert DeclaredCache.get_kv_cache_stride_order() == (0, 2, 1, 3)
    assert DeclaredCache.get_kv_cache_stride_order(True) == (1, 0, 3, 2, 4)
    with pytest.raises(ValueError, match="no cp_lse_ag_out_rs"):
        combine_across_ranks(SimpleNamespace(dcp_comm_backend="ag_rs"))
