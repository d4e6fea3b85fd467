"""A vLLM of a few classes: what the backend subclasses, registers with and asks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

OURS = "anabranch.integrations.vllm"


class Backends(Enum):
    CUSTOM = None
    CPU_ATTN = "fake_vllm.OwnCpuBackend"
    CPU_MLA = "fake_vllm.OwnCpuLatentBackend"

    def get_path(self) -> str:
        return REGISTERED.get(self) or self.value


class CudaGraphs(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2


class Layer:
    dcp_world_size = 1


class Builder:
    reorder_batch_threshold: int | None = None

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.layer_names, self.device = vllm_config, names, device

    def _init_reorder_batch_threshold(self, tokens: int, supports_spec_as_decode: bool) -> None:
        assert supports_spec_as_decode
        self.reorder_batch_threshold = max(tokens, 1 + self.vllm_config.num_drafts)


class OwnCpuBackend:
    pass


class OwnCpuLatentBackend:
    pass


class LatentBackend:
    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [24, 320, 576]


class LatentLayer:
    """MLACommonImpl."""

    need_to_return_lse_for_decode = False

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_heads, self.head_size, self.scale, _, _, _, self.kv_cache_dtype = args
        self.kv_lora_rank = options["kv_lora_rank"]
        self.supports_quant_query_input = True


@dataclass
class LatentDecode:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


class QueryLengths(Enum):
    VARLEN = "varlen"


class LatentBuilder(Builder):
    """MLACommonMetadataBuilder: leading sequences with few tokens are decodes."""

    reorder_batch_threshold: int

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._init_reorder_batch_threshold(self.reorder_batch_threshold, True)

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        lengths = common.query_start_loc_cpu.diff().tolist()
        long = (seq for seq, n in enumerate(lengths) if n > self.reorder_batch_threshold)
        num_decodes = next(long, len(lengths))
        decode = self._build_decode(  # type: ignore[attr-defined]
            block_table_tensor=common.block_table_tensor[:num_decodes],
            seq_lens_device=common.seq_lens[:num_decodes],
            max_seq_len=int(common.seq_lens.max()),
            query_start_loc_cpu=common.query_start_loc_cpu[: num_decodes + 1],
            query_start_loc_device=common.query_start_loc[: num_decodes + 1],
            num_decode_tokens=sum(lengths[:num_decodes]),
            dcp_tot_seq_lens_device=None,
            max_query_len=max(lengths),
        )
        return SimpleNamespace(decode=decode, num_decodes=num_decodes)


REGISTERED: dict[Backends, str] = {}


def install(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    chosen: Backends | None = None,
    *,
    use_mla: bool = False,
) -> None:
    """Put the modules where an import finds them, and forget what was imported with others."""
    REGISTERED.clear()
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=chosen),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
        "vllm.model_executor.layers.attention.mla_attention": {
            "MLACommonBackend": LatentBackend,
            "MLACommonDecodeMetadata": LatentDecode,
            "MLACommonImpl": LatentLayer,
            "MLACommonMetadataBuilder": LatentBuilder,
            "QueryLenSupport": QueryLengths,
        },
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
    for name in ("backend", "metadata_builder", "latent_backend", "latent_metadata"):
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
