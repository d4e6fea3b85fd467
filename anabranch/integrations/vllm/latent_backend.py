"""The backend that vLLM selects as CUSTOM in models with multi-head latent attention (MLA).

vLLM's own code projects queries and outputs, and computes prompts with expanded keys. What it calls
decoding, queries absorbed into the latent space, is ours.
"""

from __future__ import annotations

from typing import Any

import torch

from anabranch.integrations.vllm.compat import (
    describe_constants,
    latent_interface,
)
from anabranch.integrations.vllm.declared_backend import DeclaredBackend
from anabranch.integrations.vllm.latent_layer import LatentPages, attend_latent_batch
from anabranch.integrations.vllm.latent_metadata import AnabranchLatentMetadataBuilder
from anabranch.integrations.vllm.layer_options import FP8_DTYPES, latent_refusal

_interface = latent_interface()
describe_constants()
HEAD_SIZES: list[int] = _interface.MLACommonBackend.get_supported_head_sizes()


class AnabranchLatentAttention(_interface.MLACommonImpl):
    """One latent attention layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **options: Any,
    ) -> None:
        why = latent_refusal(
            head_size=head_size,
            head_sizes=HEAD_SIZES,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            window=sliding_window,
        )
        if why is not None:
            raise ValueError(why)
        shapes = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
        super().__init__(*shapes, kv_cache_dtype, *args, **options)  # pyright: ignore
        self.supports_quant_query_input = False  # attend reads codes with plain queries

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write new rows: on a GPU in vLLM's one launch, which its build for CPUs does not have."""
        if kv_cache.is_cuda:
            args = (kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
            super().do_kv_cache_update(*args)  # pyright: ignore
        elif kv_cache.numel():
            self._pages(kv_cache, k_scale, kv_c_normed.dtype).write(kv_c_normed, k_pe, slot_mapping)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed queries, whole or in two parts, of sequences that vLLM decodes."""
        absorbed = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        pages = self._pages(kv_c_and_k_pe_cache, layer._k_scale, absorbed.dtype)
        batch = attn_metadata.decode.batch
        state = attend_latent_batch(self, absorbed, pages, batch, scale=self.scale)
        return state.out, state.lse if self.need_to_return_lse_for_decode else None

    def _pages(
        self, kv_cache: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
    ) -> LatentPages:
        is_fp8 = self.kv_cache_dtype in FP8_DTYPES
        return LatentPages(kv_cache, self.kv_lora_rank, scale if is_fp8 else None, dtype)


class AnabranchLatentBackend(DeclaredBackend, _interface.MLACommonBackend):
    """What the backend supports, as vLLM asks before it builds a model."""

    @staticmethod
    def get_impl_cls() -> type[AnabranchLatentAttention]:
        """The attention of a layer."""
        return AnabranchLatentAttention

    @staticmethod
    def get_builder_cls() -> type[AnabranchLatentMetadataBuilder]:
        """The builder of a step's metadata."""
        return AnabranchLatentMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """A tile of the kernel for Hopper, and what vLLM's own backends use."""
        return 64

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
        return latent_refusal(
            head_size=head_size, head_sizes=HEAD_SIZES, dtype=dtype, kv_cache_dtype=kv_cache_dtype
        )
