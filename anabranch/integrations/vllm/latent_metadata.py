"""Metadata of latent layers: vLLM's own, with the batch of its decodes as attend needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.compat import attention_interface, latent_interface
from anabranch.integrations.vllm.query_sections import Bounds, find_bounds

_interface = latent_interface()
# Longest query that is absorbed. Expanding a key costs as much as about 170 queries of it save
# (UpProjection.prefers_expanded), and a short query may have a long context.
ABSORBED_TOKENS = 128


@dataclass
class LatentDecodes(_interface.MLACommonDecodeMetadata):
    """vLLM's fields, and the decodes, verifications and short prompts of a batch."""

    batch: BatchMetadata


class AnabranchLatentMetadataBuilder(_interface.MLACommonMetadataBuilder):
    """Plans are made by the first layer of a pass, as those of other caches are."""

    _cudagraph_support: ClassVar[Any] = attention_interface().AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = _interface.QueryLenSupport.VARLEN
    reorder_batch_threshold: int = ABSORBED_TOKENS

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # pyright: ignore
        absorbed = self.reorder_batch_threshold  # 1 with decode context parallel
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.decode_tokens = self.reorder_batch_threshold  # of a verification
        if device.type == "cpu":  # where vLLM cannot read a context to expand it
            absorbed = max(absorbed, vllm_config.scheduler_config.max_num_batched_tokens)
        self.reorder_batch_threshold = absorbed

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> LatentDecodes:
        """The batch is cut where short prompts begin; a graph has none."""
        num_seqs = seq_lens_device.shape[0]
        bounds = [Bounds(slice(0, num_seqs), slice(0, num_decode_tokens), False)]
        if int(query_start_loc_cpu.diff().max()) > self.decode_tokens:
            bounds = find_bounds(
                query_start_loc_cpu, None, num_decode_tokens, decode_tokens=self.decode_tokens
            )
        batch = BatchMetadata(
            query_start_loc_device,
            seq_lens_device,
            block_table_tensor,
            bounds,
            num_tokens=num_decode_tokens,
        )
        return LatentDecodes(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            batch=batch,
        )
