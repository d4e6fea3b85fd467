"""vLLM: anabranch as an attention backend of its models.

    vllm serve MODEL --attention-backend CUSTOM

The entry point `anabranch` of the group `vllm.general_plugins` calls register() in every process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = "anabranch.integrations.vllm.backend.AnabranchBackend"
CPU_BACKEND = "anabranch.integrations.vllm.cpu_choice.CpuBackend"


def register() -> None:
    """Make the backend CUSTOM known to vLLM; a second call changes nothing.

    vLLM calls this whichever backend is chosen, so the version is checked when CUSTOM is.
    """
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    backends = registry.AttentionBackendEnum
    registry.register_backend(backends.CUSTOM, BACKEND)
    registry.register_backend(backends.CPU_ATTN, CPU_BACKEND)
