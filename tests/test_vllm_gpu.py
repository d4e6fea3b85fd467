"""The vLLM backend in captured graphs, as vLLM captures: metadata outside, layers inside."""

from __future__ import annotations

import pytest
import torch
from fake_vllm import common_metadata

from anabranch.integrations.vllm.batch_metadata import BatchMetadata, read_batch
from anabranch.integrations.vllm.layer_attention import CachePages, attend_batch
from anabranch.integrations.vllm.layer_options import LayerOptions

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, PAGE, WIDTH = 8, 2, 64, 16, 24
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("captured", "replayed"),
    [
        (([1] * 4, [1] * 4), ([1, 1, 1, 0], [300, 17, 65, 0])),  # decode, with padding
        (([5] * 4, [5] * 4), ([5, 5, 3, 0], [333, 21, 70, 0])),  # verification
        (([16] * 4, [16] * 4), ([1, 1, 40, 20], [200, 33, 40, 128])),  # a mixed batch
    ],
)
def test_a_graph_serves_other_lengths(
    dtype: torch.dtype,
    captured: tuple[list[int], list[int]],
    replayed: tuple[list[int], list[int]],
) -> None:
    num_tokens = sum(captured[0])
    q = torch.randn(num_tokens, HEADS, DIM, dtype=dtype, device="cuda")
    shape = (4 * WIDTH, KV_HEADS, PAGE, 2 * DIM)
    pages = [CachePages(torch.randn(shape, dtype=dtype, device="cuda"), DIM) for _ in LAYERS]
    layers: list[object] = [object() for _ in LAYERS]
    batch = make_batch(*captured, num_tokens=num_tokens)
    forward(batch, q, pages, layers)  # kernels are compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = forward(batch, q, pages, layers)
        batch.seq_lens += batch.query_start_loc.diff() > 0  # as from draft to draft
        second = forward(batch, q, pages, layers)
    now = make_batch(*replayed, num_tokens=num_tokens)
    for kept, new in (
        (batch.query_start_loc, now.query_start_loc),
        (batch.seq_lens, now.seq_lens),
        (batch.block_table, now.block_table),
    ):
        kept.copy_(new)
    graph.replay()
    assert torch.equal(first, forward(now, q, pages, layers))
    now.seq_lens += now.query_start_loc.diff() > 0
    assert torch.equal(second, forward(now, q, pages, layers))
    assert not torch.equal(first, second)
