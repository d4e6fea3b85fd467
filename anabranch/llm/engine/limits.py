"""Sizes of an engine: what is asked for, what the models take, and what memory is left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from anabranch.distributed.rank_group import RankGroup, least_of_all, make_on_all
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.models import LoadedModel
from anabranch.llm.runner.find_layers import find_layers
from anabranch.llm.runner.graphs import Progress
from anabranch.llm.runner.kv_cache import CacheFormats, page_bytes
from anabranch.llm.runner.model_attention import Layers

GIB = 1 << 30
CPU_CACHE_GIB = 1.0
SAMPLING_COPIES = 8  # float32 copies of the logits that sampling may hold at once
SCORED_TOKENS = 512  # of prompts in a step whose logits are kept, for prompt_logprobs
SCORING_COPIES = 2  # of their logits as float32
GRAPH_BYTES = GIB  # that captured graphs may keep of a GPU
PROFILED_CPU_TOKENS = 16  # finds the layers; activations are not measured on a CPU
FALLBACK_CONTEXT = 2048  # of a model that names no limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine, all decided. Every rank has `num_pages`, which it shares a page at a time
    if the context is dealt out: `page_size` counts the tokens of a page on all ranks.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    page_size: int
    num_pages: int
    max_drafts: int

    @property
    def table_width(self) -> int:
        """Pages of a sequence, with drafts after its last token."""
        return -(-(self.max_model_len + self.max_drafts) // self.page_size)


def text_config(loaded: LoadedModel) -> Any:
    """The part of a config that describes the language model."""
    return cast("Any", loaded.config).get_text_config()


def vocab_size(loaded: LoadedModel) -> int:
    """Rows of logits."""
    return text_config(loaded).vocab_size


def size(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    say: Progress,
    ranks: RankGroup | None = None,
) -> tuple[Limits, Layers, Layers]:
    """Run the models, on a GPU over the largest step, and give what is left to the cache.

    Ranks take the least of what each of them has room for.
    """
    on_gpu = device.type == "cuda"
    max_num_seqs = config.max_num_seqs or (64 if on_gpu else 16)
    max_num_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 1024)
    if max_num_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_tokens} must be at least "
            f"max_num_seqs {max_num_seqs}: every sequence runs a token a step"
        )
    models = [target] + ([draft] if draft else [])
    context = least_of_all(ranks, make_on_all(ranks, lambda: _context(config, models)))
    max_drafts = config.speculative.num_drafts if config.speculative else 0
    say("profiling memory", 0, 0)
    vocab = vocab_size(target)
    largest = min(max_num_tokens if on_gpu else PROFILED_CPU_TOKENS, context)
    layers, draft_layers = _profile(
        [each.model for each in models], largest, vocab, config.cache_formats
    )
    logits = max_num_seqs * (1 + max_drafts) * vocab * 4 * SAMPLING_COPIES
    if draft is not None and config.speculative:  # drawing drafts in a graph
        rows = max_num_seqs * config.speculative.tree_width
        logits += rows * SAMPLING_COPIES * vocab * 4
    logits += min(SCORED_TOKENS, max_num_tokens) * SCORING_COPIES * vocab * 4
    every_layer = [*layers.values(), *draft_layers.values()]
    if config.context_parallel > 1 and any(shape.is_latent for shape in every_layer):
        raise ValueError(
            f"context_parallel {config.context_parallel}: latent rows are not dealt out"
        )
    if any(shape.expands_prompts(device) for shape in every_layer):
        logits += int(config.max_workspace_mib * (1 << 20))
    budget = make_on_all(ranks, lambda: _cache_bytes(config, device, logits))
    page_size = config.page_size * config.context_parallel
    one_page = page_bytes([*layers.values()], config.page_size)
    if config.sparse is not None and config.sparse.method == "pages":  # with two bounds a page
        one_page += 2 * page_bytes([replace(x, head_dim_v=0) for x in layers.values()], 1)
    one_page += page_bytes([*draft_layers.values()], page_size)
    wanted = -(-context // page_size)
    num_pages = least_of_all(ranks, int(min(budget // one_page, wanted * max_num_seqs)))
    if num_pages < 1 or (num_pages < wanted and config.max_model_len is not None):
        raise ValueError(
            f"a sequence of max_model_len {context} needs {wanted * one_page / GIB:.2f} GiB of "
            f"cache, there are {budget / GIB:.2f} GiB; give a smaller max_model_len or more memory"
        )
    context = min(context, num_pages * page_size)
    limits = Limits(context, max_num_seqs, max_num_tokens, page_size, num_pages, max_drafts)
    return limits, layers, draft_layers


def _context(config: EngineConfig, models: list[LoadedModel]) -> int:
    limit, name = min((_positions(model), model.name) for model in models)
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(f"max_model_len {config.max_model_len} exceeds {name}'s {limit}")
    return config.max_model_len


def _positions(loaded: LoadedModel) -> int:
    return getattr(text_config(loaded), "max_position_embeddings", None) or FALLBACK_CONTEXT


@torch.inference_mode()
def _profile(
    models: list[Any], num_tokens: int, vocab_size: int, formats: CacheFormats
) -> tuple[Layers, Layers]:
    """Run every model once over some tokens; their layers, to be kept in these formats."""
    found = [
        {
            module: replace(shape, formats=formats)
            for module, shape in find_layers(model, num_tokens, vocab_size).items()
        }
        for model in models
    ]
    return found[0], found[1] if len(found) > 1 else {}


def _cache_bytes(config: EngineConfig, device: torch.device, logits: int) -> int:
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * GIB)
    if device.type != "cuda":
        return int(CPU_CACHE_GIB * GIB)
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # activations at their peak are in `held`: the allocator keeps what it once had
    used = total - free - held
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    budget = int(total * config.gpu_memory_utilization) - used - peak - logits - GRAPH_BYTES
    if budget <= 0:
        raise ValueError(
            f"weights and activations take {(used + peak) / GIB:.1f} GiB of {total / GIB:.1f}, "
            f"of which gpu_memory_utilization {config.gpu_memory_utilization} may be used: "
            "nothing is left for the cache"
        )
    torch.cuda.empty_cache()
    return budget
