"""The vLLM backend in captured graphs, as vLLM captures: metadata outside, layers inside."""

from __future__ import annotations

import pytest
import torch
from cases import assert_right
from fake_vllm import common_metadata

from anabranch import AttentionState, reference
from anabranch.integrations.vllm.batch_metadata import BatchMetadata, read_batch
from anabranch.integrations.vllm.cache_pages import CachePages, CacheScales
from anabranch.integrations.vllm.latent_layer import LatentPages, attend_latent_batch
from anabranch.integrations.vllm.layer_attention import attend_batch
from anabranch.integrations.vllm.layer_options import LayerOptions

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE, WIDTH = 8, 2, 64, 16, 24
E4M3 = torch.float8_e4m3fn
CAUSAL = {"causal": True, "window": None, "softcap": None, "sinks": None, "tree_mask": None}
LAYERS = [
    LayerOptions(DIM**-0.5, window, None, None, reads_other_layer=False)
    for window in (None, 40, None)
]


def make_batch(q_lens: list[int], k_lens: list[int], *, num_tokens: int) -> BatchMetadata:
    """On the device, in one section as for a capture, with padding up to `num_tokens`."""
    table = torch.arange(len(q_lens) * WIDTH, dtype=torch.int32).view(-1, WIDTH)
    common = common_metadata(q_lens, k_lens, table, num_actual_tokens=num_tokens)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        setattr(common, name, getattr(common, name).cuda())
    return read_batch(common, decode_tokens=None)


def forward(
    batch: BatchMetadata, q: torch.Tensor, pages: list[CachePages], layers: list[object]
) -> torch.Tensor:
    """The outputs of all layers."""
    outputs = torch.zeros(len(LAYERS), *q.shape, dtype=q.dtype, device=q.device)
    for layer, options, cache, output in zip(layers, LAYERS, pages, outputs, strict=True):
        attend_batch(layer, options, q, None, None, cache, batch, output)
    return outputs


def make_pages(dtype: torch.dtype, *, fp8: bool) -> CachePages:
    cache = torch.randn(4 * WIDTH, KV_HEADS, PAGE, 2 * DIM, dtype=dtype, device="cuda")
    if not fp8:
        return CachePages(cache, DIM)
    k_scale, v_scale = torch.tensor([0.25, 2.0], device="cuda").unbind()
    return CachePages(cache.to(E4M3).view(torch.uint8), DIM, CacheScales(k_scale, v_scale, dtype))


def take_over(batch: BatchMetadata, now: BatchMetadata) -> None:
    """Put other lengths where a captured graph reads them."""
    batch.query_start_loc.copy_(now.query_start_loc)
    batch.seq_lens.copy_(now.seq_lens)
    batch.block_table.copy_(now.block_table)


DECODE = (([1] * 4, [1] * 4), ([1, 1, 1, 0], [300, 17, 65, 0]))  # with padding
VERIFY = (([5] * 4, [5] * 4), ([5, 5, 3, 0], [333, 21, 70, 0]))
MIXED = (([16] * 4, [16] * 4), ([1, 1, 40, 20], [200, 33, 40, 128]))


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)],
    ids=["bfloat16", "float32", "fp8"],
)
@pytest.mark.parametrize(
    ("captured", "replayed"), [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"]
)
def test_a_graph_serves_other_lengths(
    dtype: torch.dtype,
    fp8: bool,
    captured: tuple[list[int], list[int]],
    replayed: tuple[list[int], list[int]],
) -> None:
    num_tokens = sum(captured[0])
    q = torch.randn(num_tokens, HEADS, DIM, dtype=dtype, device="cuda")
    pages = [make_pages(dtype, fp8=fp8) for _ in LAYERS]
    layers: list[object] = [object() for _ in LAYERS]
    batch = make_batch(*captured, num_tokens=num_tokens)
    forward(batch, q, pages, layers)  # kernels are compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = forward(batch, q, pages, layers)
        batch.seq_lens += batch.query_start_loc.diff() > 0  # as from draft to draft
        second = forward(batch, q, pages, layers)
    now = make_batch(*replayed, num_tokens=num_tokens)
    take_over(batch, now)
    graph.replay()
    assert torch.equal(first, forward(now, q, pages, layers))
    now.seq_lens += now.query_start_loc.diff() > 0
    assert torch.equal(second, forward(now, q, pages, layers))
    assert not torch.equal(first, second)


def test_fp8_keys_are_written_and_read() -> None:
    """Prompts without a past too are attended to as codes."""
    pages, lens = make_pages(torch.bfloat16, fp8=True), [3, 40, 1, 20]
    batch = make_batch(lens, lens, num_tokens=sum(lens))
    at = torch.cat([seq * WIDTH * PAGE + torch.arange(n) for seq, n in enumerate(lens)]).cuda()
    q = torch.randn(sum(lens), HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, sum(lens), KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    before = pages.kv_cache.clone()
    pages.write(k, v, at)
    rows = pages.kv_cache.transpose(1, 2).flatten(0, 1)
    codes = torch.cat([(k.float() / 0.25).to(E4M3), (v.float() / 2.0).to(E4M3)], dim=-1)
    assert torch.equal(rows[at], codes.view(torch.uint8))
    others = torch.ones(len(rows), dtype=torch.bool, device="cuda").index_fill(0, at, False)
    assert torch.equal(rows[others], before.transpose(1, 2).flatten(0, 1)[others])
    output = torch.empty_like(q)
    attend_batch(object(), LAYERS[0], q, k, v, pages, batch, output)
    keys = pages.keys(batch.block_table, batch.seq_lens)
    options = {**CAUSAL, "cu_seqlens_q": batch.query_start_loc, "scale": DIM**-0.5}
    state = AttentionState(output, reference.attend(q, keys, **options).lse.float())
    assert_right(state, q, keys, options)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("captured", "replayed"), [DECODE, VERIFY], ids=["decode", "verify"])
def test_latent_graphs(
    captured: tuple[list[int], list[int]],
    replayed: tuple[list[int], list[int]],
    num_heads: int,
    fp8: bool,
) -> None:
    """Two layers share a plan, which a replay makes anew."""
    dtype, num_tokens, page_size = torch.bfloat16, sum(captured[0]), 64
    q = torch.randn(num_tokens, num_heads, 576, dtype=dtype, device="cuda")
    caches = torch.randn(2, 4 * WIDTH, page_size, 576, dtype=dtype, device="cuda")
    scale = torch.tensor(0.5, device="cuda") if fp8 else None
    stored = caches.to(E4M3).view(torch.uint8) if fp8 else caches
    pages = [LatentPages(cache, 512, scale, dtype) for cache in stored]
    layers = [object(), object()]

    def forward(batch: BatchMetadata) -> list[AttentionState]:
        return [
            attend_latent_batch(layer, q, rows, batch, scale=192**-0.5)
            for layer, rows in zip(layers, pages, strict=True)
        ]

    batch = make_batch(*captured, num_tokens=num_tokens)
    forward(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = forward(batch)
    now = make_batch(*replayed, num_tokens=num_tokens)
    take_over(batch, now)
    graph.replay()
    options = {**CAUSAL, "cu_seqlens_q": now.query_start_loc, "scale": 192**-0.5}
    for state, rows in zip(states, pages, strict=True):
        assert_right(state, q, rows.keys(now.block_table, now.seq_lens), options)
