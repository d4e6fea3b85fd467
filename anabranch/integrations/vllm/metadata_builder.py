"""vLLM's metadata builder: the batch of a step, for all layers of a group."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from anabranch.integrations.vllm.batch_metadata import BatchMetadata, read_batch
from anabranch.integrations.vllm.compat import attention_interface
from anabranch.integrations.vllm.section_kinds import section_kinds
from anabranch.launches.compile_ahead import compiling_ahead

_interface = attention_interface()


class AnabranchMetadataBuilder(_interface.AttentionMetadataBuilder):
    """Looks at the host's copy of the lengths only to cut a batch; the device's decide the rest."""

    _cudagraph_support: ClassVar[Any] = _interface.AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # pyright: ignore
        reference_window = getattr(vllm_config.model_config, "rswa_window", None)
        if reference_window is not None:
            raise ValueError(
                f"reference sliding windows are not supported, got rswa_window={reference_window}"
            )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._is_compiled = device.type != "cuda"

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> BatchMetadata:
        """The batch of a step that runs layers outside of a graph."""
        return read_batch(common_attn_metadata, decode_tokens=self.reorder_batch_threshold or 1)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> BatchMetadata:
        """A batch in one section, since a graph serves batches of all kinds.

        vLLM warms up with a batch that build() has cut, so kernels of this one are compiled here.
        """
        if not self._is_compiled:
            self._compile_sections(common_attn_metadata.block_table_tensor)
            self._is_compiled = True
        self._run_once(read_batch(common_attn_metadata, decode_tokens=None))
        return read_batch(common_attn_metadata, decode_tokens=None)

    def _compile_sections(self, table: torch.Tensor) -> None:
        """Compile, side by side, what steps outside of graphs may launch amid requests.

        Not with decode context parallel, whose layers also talk to other ranks.
        """
        limits = self.vllm_config.scheduler_config
        batches = list(
            section_kinds(
                max_tokens=limits.max_num_batched_tokens,
                max_seqs=limits.max_num_seqs,
                decode_tokens=self.reorder_batch_threshold or 1,
                table=table,
            )
        )
        most = max(batch.num_tokens for batch in batches)
        with compiling_ahead():
            for layer in self._layers_of_each_kind():
                if layer.impl.ranks is None:
                    rows = self._rows(layer, most)
                    for batch in batches:
                        _attend_once(layer, batch, rows)
        torch.cuda.empty_cache()  # vLLM counts what is held while it captures

    def _run_once(self, batch: BatchMetadata) -> None:
        """Attend in a layer of each kind; cache and outputs of the model are not touched."""
        for layer in self._layers_of_each_kind():
            _attend_once(layer, batch, self._rows(layer, batch.num_tokens))

    def _layers_of_each_kind(self) -> list[Any]:
        layers = self.vllm_config.compilation_config.static_forward_context
        kinds: dict[Any, Any] = {}
        for layer in (layers[name] for name in self.layer_names):
            options = layer.impl.options
            shape = (layer.impl.num_heads, layer.impl.num_kv_heads, layer.impl.head_size)
            rules = (options.window, options.softcap, options.sinks is None)
            kinds.setdefault((*shape, *rules, layer.kv_cache.dtype), layer)
        return list(kinds.values())

    def _rows(self, layer: Any, num_tokens: int) -> list[torch.Tensor]:
        """Queries, outputs, keys and values of so many tokens."""
        impl, like = layer.impl, {"dtype": layer.impl.dtype, "device": self.device}
        heads = (impl.num_heads, impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
        return [torch.zeros(num_tokens, count, impl.head_size, **like) for count in heads]

    def update_draft_decode_metadata(self, metadata: BatchMetadata) -> None:
        """Nothing: the first layer of the next draft reads the lengths as they are then."""


def _attend_once(layer: Any, batch: BatchMetadata, rows: list[torch.Tensor]) -> None:
    q, output, k, v = (each[: batch.num_tokens] for each in rows)
    layer.impl.forward(layer, q, k, v, layer.kv_cache, batch, output)
