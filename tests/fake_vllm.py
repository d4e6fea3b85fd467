"""A vLLM of a few classes: what the backend subclasses, registers with and asks."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OURS = "anabranch.integrations.vllm"


class Backends(Enum):
    CUSTOM = None
    CPU_ATTN = "fake_vllm.OwnCpuBackend"

    def get_path(self) -> str:
        return REGISTERED.get(self) or self.value


class CudaGraphs(Enum):
    ALWAYS = 3


class Layer:
    dcp_world_size = 1


class Builder:
    reorder_batch_threshold: int | None = None

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.layer_names, self.device = vllm_config, names, device

    def _init_reorder_batch_threshold(self, tokens: int, supports_spec_as_decode: bool) -> None:
        assert supports_spec_as_decode
        self.reorder_batch_threshold = tokens + self.vllm_config.num_drafts


class OwnCpuBackend:
    pass


REGISTERED: dict[Backends, str] = {}


def install(monkeypatch: pytest.MonkeyPatch, version: str, chosen: Backends | None = None) -> None:
    """Put the modules where an import finds them, and forget what was imported with others."""
    REGISTERED.clear()
    config = SimpleNamespace(attention_config=SimpleNamespace(backend=chosen))
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": object,
            "AttentionCGSupport": CudaGraphs,
            "AttentionImpl": Layer,
            "AttentionMetadataBuilder": Builder,
            "MultipleOf": SimpleNamespace,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Backends,
            "register_backend": REGISTERED.__setitem__,
        },
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("backend", "metadata_builder", "cpu_choice"):
        monkeypatch.delitem(sys.modules, f"{OURS}.{name}", raising=False)


def common_metadata(q_lens: list[int], k_lens: list[int], table: torch.Tensor, **more: Any) -> Any:
    """CommonAttentionMetadata of a batch, as far as the backend reads it."""
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": torch.tensor(k_lens, dtype=torch.int32),
        "seq_lens_cpu_upper_bound": torch.tensor(k_lens, dtype=torch.int32),
        "block_table_tensor": table,
        "num_reqs": len(q_lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(q_lens),
        "causal": True,
        "mm_req_doc_ranges": None,
    }
    return SimpleNamespace(**{**fields, **more})
