"""Which backend vLLM runs on a CPU: its own, or ours if CUSTOM was chosen.

vLLM's CPU platform looks up CPU_ATTN whatever `--attention-backend` says. register() points that
name to `CpuBackend` of this module, which is looked up while the configuration is current.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "CpuBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    backends = registry.AttentionBackendEnum
    config: Any = import_module("vllm.config")
    chosen = config.get_current_vllm_config().attention_config.backend
    path: str = backends.CUSTOM.get_path() if chosen is backends.CUSTOM else backends.CPU_ATTN.value
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)
