"""vLLM: anabranch as an attention backend of its models.

    vllm serve MODEL --attention-backend CUSTOM

The entry point `anabranch` of the group `vllm.general_plugins` calls register() in every process.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from anabranch.integrations.vllm.backend_choice import CPU_NAMES, CUSTOM


def register() -> None:
    """Make the backend CUSTOM known to vLLM; a second call changes nothing.

    vLLM calls this whichever backend is chosen, so the version is checked when CUSTOM is.
    """
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    backends = registry.AttentionBackendEnum
    registry.register_backend(backends.CUSTOM, f"{__name__}.backend_choice.{CUSTOM}")
    for ours, theirs in CPU_NAMES.items():
        if theirs in backends.__members__:  # vLLM 0.26 has no latent attention on CPUs
            registry.register_backend(backends[theirs], f"{__name__}.backend_choice.{ours}")
