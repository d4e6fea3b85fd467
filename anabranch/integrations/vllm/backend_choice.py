"""Which backend a name of vLLM's stands for, looked up while the configuration is current.

CUSTOM is the backend of latent caches in models with multi-head latent attention, and that of keys
and values in others. vLLM's CPU platform looks up names of its own, whatever
`--attention-backend` says; they stand for CUSTOM if that was chosen.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

CUSTOM = "CustomBackend"
CPU_NAMES = {"CpuBackend": "CPU_ATTN", "CpuLatentBackend": "CPU_MLA", "AmxLatentBackend": "AMX_MLA"}
_FOLDER = __name__.rpartition(".")[0]
PLAIN_BACKEND = f"{_FOLDER}.backend.AnabranchBackend"
LATENT_BACKEND = f"{_FOLDER}.latent_backend.AnabranchLatentBackend"


def __getattr__(name: str) -> Any:
    if name != CUSTOM and name not in CPU_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    configs: Any = import_module("vllm.config")
    config = configs.get_current_vllm_config_or_none()
    if name in CPU_NAMES:
        registry: Any = import_module("vllm.v1.attention.backends.registry")
        backends = registry.AttentionBackendEnum
        if config is None or config.attention_config.backend is not backends.CUSTOM:
            return _load(backends[CPU_NAMES[name]].value)
    model = None if config is None else config.model_config
    return _load(LATENT_BACKEND if model is not None and model.use_mla else PLAIN_BACKEND)


def _load(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute)
