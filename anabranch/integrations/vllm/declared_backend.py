"""What both backends, of plain and of latent caches, declare to vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anabranch.integrations.vllm.compat import attention_interface
from anabranch.integrations.vllm.layer_options import CACHE_DTYPES, FP8_DTYPES


class DeclaredBackend:
    """Its name, and the dtypes, pages and heads that it takes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        dtype for dtype in CACHE_DTYPES.values() if dtype
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*CACHE_DTYPES, *FP8_DTYPES]

    @staticmethod
    def get_name() -> str:
        """The name it is selected by."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any would do; vLLM takes the least for layers with windows, and small pages are slow."""
        return [attention_interface().MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any; one that does not fit is refused by its value, in supports_combination."""
        return True
