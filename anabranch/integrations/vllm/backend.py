"""The backend that vLLM selects as CUSTOM, and the attention of its layers."""

from __future__ import annotations

from typing import Any

import torch

from anabranch.integrations.vllm.batch_metadata import BatchMetadata
from anabranch.integrations.vllm.cache_pages import CachePages, CacheScales
from anabranch.integrations.vllm.compat import (
    DeclaredCache,
    attention_interface,
    describe_constants,
)
from anabranch.integrations.vllm.context_ranks import attend_across_ranks, find_ranks
from anabranch.integrations.vllm.declared_backend import DeclaredBackend
from anabranch.integrations.vllm.layer_attention import attend_batch
from anabranch.integrations.vllm.layer_options import (
    FP8_DTYPES,
    LayerOptions,
    refusal,
)
from anabranch.integrations.vllm.metadata_builder import AnabranchMetadataBuilder

_interface = attention_interface()
describe_constants()


class AnabranchAttention(_interface.AttentionImpl):
    """One attention layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.dtype = torch.get_default_dtype()  # of the model, while vLLM makes it
        why = refusal(
            head_size=head_size,
            dtype=self.dtype,
            kv_cache_dtype=kv_cache_dtype,
            attn_type=str(getattr(attn_type, "value", attn_type)),
            has_alibi=alibi_slopes is not None,
        )
        if why is not None:
            raise ValueError(why)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.options = LayerOptions(
            scale=self.scale,
            window=sliding_window,
            softcap=logits_soft_cap or None,
            sinks=sinks,
            reads_other_layer=kv_sharing_target_layer_name is not None,
        )
        self.ranks = find_ranks(
            self.dcp_world_size,
            window=sliding_window,
            num_kv_heads=self.num_kv_heads,
            keys_of=kv_sharing_target_layer_name,
        )
        self._cache: CachePages | None = None

    def _pages(self, layer: Any, kv_cache: torch.Tensor) -> CachePages:
        """Views of the cache, made once: vLLM keeps one tensor a layer."""
        if self._cache is None or self._cache.kv_cache is not kv_cache:
            scales = None
            if self.kv_cache_dtype in FP8_DTYPES:
                scales = CacheScales(layer._k_scale, layer._v_scale, self.dtype)
            self._cache = CachePages(kv_cache, self.head_size, scales)
        return self._cache

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values of a batch; slots of padding are negative."""
        if kv_cache.numel():
            self._pages(layer, kv_cache).write(key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: BatchMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend into `output`, which is returned; zeros while vLLM measures its memory."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("quantised outputs are not supported, got an output_scale")
        if attn_metadata is None:
            return output.fill_(0)
        pages = self._pages(layer, kv_cache)
        if self.ranks is None:
            attend_batch(self, self.options, query, key, value, pages, attn_metadata, output)
        else:
            attend_across_ranks(
                self, self.options, query, key, value, pages, attn_metadata, output, self.ranks
            )
        return output


class AnabranchBackend(DeclaredBackend, DeclaredCache, _interface.AttentionBackend):
    """What the backend supports, as vLLM asks before it builds a model."""

    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_impl_cls() -> type[AnabranchAttention]:
        """The attention of a layer."""
        return AnabranchAttention

    @staticmethod
    def get_builder_cls() -> type[AnabranchMetadataBuilder]:
        """The builder of a step's metadata."""
        return AnabranchMetadataBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks are states."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """On causal layers."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Without a window."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *_: Any,
        **__: Any,
    ) -> str | None:
        """Why a layer is refused, with the value."""
        return refusal(head_size=head_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
