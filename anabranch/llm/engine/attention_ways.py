"""In which ways decode steps may attend, from the options and the limits of an engine."""

from __future__ import annotations

import torch

from anabranch.compositions.cascade import MIN_SAVED_BYTES
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.engine.limits import Limits
from anabranch.llm.runner.graphs import GraphKey, StepChoice, graph_batches
from anabranch.llm.runner.model_attention import Layers
from anabranch.llm.runner.shared_prefixes import SharedPrefixes


def decode_keys(limits: Limits, choice: StepChoice) -> list[GraphKey]:
    """Shapes of decode steps, for every way in which they may attend."""
    batches, lengths = graph_batches(limits.max_num_seqs), {1, 1 + limits.max_drafts}
    return choice.keys([GraphKey(q, b) for q in lengths for b in batches])


def shared_prefixes(
    config: EngineConfig, limits: Limits, layers: Layers, device: torch.device
) -> SharedPrefixes | None:
    """By default, prefixes are shared on GPUs only: a CPU's decode kernel reads pages in place.

    Over latent rows sharing has not been timed, so it must be requested.
    """
    plain = not any(layer.is_latent for layer in layers.values())
    wanted = device.type == "cuda" and plain if config.cascade is None else config.cascade
    token_bytes = max(layer.bytes_per_token for layer in layers.values())
    most = (limits.max_num_seqs - 1) * limits.max_model_len * token_bytes  # that sharing can save
    always = config.cascade is True
    if not wanted or not config.prefix_caching or not (always or most >= MIN_SAVED_BYTES):
        return None
    return SharedPrefixes(page_size=limits.page_size, token_bytes=token_bytes, always=always)
