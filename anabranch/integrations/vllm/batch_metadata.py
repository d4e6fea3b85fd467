"""What the layers of a forward pass share: sections of the batch and their plans.

vLLM builds metadata outside a captured graph and runs layers inside it. Sections and plans are made
by the first layer of a pass: once a step, and inside a graph anew from the lengths at each replay,
so that no buffer has to be refilled beside the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from anabranch.compositions.sections import Section, SectionPlans
from anabranch.integrations.vllm.query_sections import Bounds, cut_section, find_bounds


@dataclass
class BatchMetadata:
    """A batch of vLLM's as attend needs it; every length is on the device.

    vLLM's builders of chunked local attention add attributes of their own.
    """

    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    block_table: torch.Tensor  # int32 [num_seqs, max_pages]
    bounds: list[Bounds]
    num_tokens: int
    causal: bool = True
    plans: SectionPlans = field(default_factory=SectionPlans)
    _layers: set[int] = field(default_factory=set[int])
    _shared: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def enter(self, layer: object) -> None:
        """Begin a layer. One that comes a second time begins another pass.

        Lengths on the device may have changed in between, as they do from draft to draft.
        """
        if id(layer) in self._layers:
            self._layers.clear()
            self._shared.clear()
            self.plans.clear()
        self._layers.add(id(layer))

    def sections(self) -> list[Section]:
        tensors = (self.query_start_loc, self.seq_lens, self.block_table)
        if "sections" not in self._shared:
            cut = (cut_section(bounds, *tensors, causal=self.causal) for bounds in self.bounds)
            self._shared["sections"] = [*cut]
        return self._shared["sections"]

    def local_context_lens(self, *, rank: int, num_ranks: int, interleave: int) -> torch.Tensor:
        """Keys of earlier steps that lie on this rank, where ranks take turns of `interleave`."""
        key = ("context", rank)
        if key not in self._shared:
            context = self.seq_lens - self.query_start_loc.diff()
            turn = interleave * num_ranks
            rest = (context % turn - rank * interleave).clamp(0, interleave)
            self._shared[key] = (context // turn * interleave + rest).int()
        return self._shared[key]


def read_batch(common: Any, *, decode_tokens: int | None) -> BatchMetadata:
    """From vLLM's CommonAttentionMetadata; in one section without `decode_tokens`."""
    if isinstance(common.causal, torch.Tensor):
        raise ValueError(f"causal must be one value for all sequences, got {common.causal}")
    if getattr(common, "mm_req_doc_ranges", None):
        raise ValueError(
            f"bidirectional ranges in prompts are not supported, got {common.mm_req_doc_ranges}"
        )
    num_seqs, num_tokens = common.num_reqs, common.num_actual_tokens
    bounds = [Bounds(slice(0, num_seqs), slice(0, num_tokens), False)]
    if decode_tokens is not None and common.max_query_len > decode_tokens:
        most_keys = common.seq_lens_cpu_upper_bound
        if most_keys is not None and len(most_keys) < num_seqs:  # of requests, not of their chunks
            most_keys = None
        bounds = find_bounds(
            common.query_start_loc_cpu[: num_seqs + 1],
            most_keys,
            num_tokens,
            decode_tokens=decode_tokens,
        )
    return BatchMetadata(
        common.query_start_loc[: num_seqs + 1],
        common.seq_lens[:num_seqs],
        common.block_table_tensor[:num_seqs],
        bounds,
        num_tokens=num_tokens,
        causal=common.causal,
    )
