"""From options to a model that runs: loading, probing, sizing the cache, binding, capturing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from anabranch.cache.kv_cache import LayerShape, allocate_layers, page_bytes
from anabranch.engine.attention import NAME, Layers, find_layers, register
from anabranch.engine.config import DTYPES, EngineConfig
from anabranch.engine.graphs import GraphKey, graph_batches
from anabranch.engine.inputs import StepInputs
from anabranch.engine.layout import Scorer
from anabranch.engine.runner import Progress, Runner
from anabranch.models import LoadedModel, load_model
from anabranch.models.gated import gate_joined
from anabranch.models.join import join_projections
from anabranch.models.linear import use_row_linear
from anabranch.speculative.draft_model import CATCH_UP

GIB = 1 << 30
CPU_CACHE_GIB = 1.0
SAMPLING_COPIES = 8  # float32 copies of the logits that sampling may hold at once
GRAPH_BYTES = GIB // 2  # that captured graphs keep of a GPU
COMPILED_WEIGHTS = 1_000_000_000
FALLBACK_CONTEXT = 2048  # of a model that names no limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine, all decided."""

    max_model_len: int
    max_num_seqs: int
    max_num_tokens: int
    page_size: int
    num_pages: int
    max_drafts: int


@dataclass(frozen=True, slots=True)
class Built:
    """An engine's parts."""

    target: LoadedModel
    device: torch.device
    limits: Limits
    runner: Runner
    draft: Runner | None
    unseen: torch.Tensor  # int64 [max_num_seqs, 1 + max_drafts]: tokens the host has not seen


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Load, size and capture."""
    register()
    device = config.resolve_device()
    say = progress or _silent
    target = _load(config.model, config, device, say)
    speculative = config.speculative
    draft = None
    if speculative and speculative.model:
        draft = _load(speculative.model, config, device, say)
        _check_vocabularies(target, draft)
    limits, layers, draft_layers = _size(config, target, draft, device, say)
    unseen = torch.zeros(
        limits.max_num_seqs, 1 + limits.max_drafts, dtype=torch.int64, device=device
    )
    scorer = speculative.scorer if speculative else Scorer.MULTI_QUERY
    runner = _bind(target, layers, limits, unseen, scorer)
    drafter = None
    if draft is not None:
        drafter = _bind(draft, draft_layers, limits, unseen, Scorer.MULTI_QUERY)
    if _compiles(config, target, device):
        for each in (runner, drafter):
            if each is not None:
                each.compile_layers()
    if device.type == "cuda":
        for each in (runner, drafter):
            if each is not None:
                each.warm_up(_shapes(limits), say)
    if config.cuda_graphs and device.type == "cuda":
        batches = graph_batches(limits.max_num_seqs)
        lengths = {1, 1 + limits.max_drafts}
        runner.capture([GraphKey(q, b) for q in lengths for b in batches], say)
        if drafter is not None:
            drafter.capture([GraphKey(q, b) for q in (1, CATCH_UP) for b in batches], say)
    return Built(target, device, limits, runner, drafter, unseen)


def _compiles(config: EngineConfig, target: LoadedModel, device: torch.device) -> bool:
    """Twenty seconds at the start are worth it for models that take seconds to load."""
    if config.compile is not None:
        return config.compile
    return device.type == "cuda" and target.model.num_parameters() >= COMPILED_WEIGHTS


def _shapes(limits: Limits) -> list[GraphKey]:
    """Steps that select every kind of tile: few and many queries of few and many sequences."""
    lengths = sorted({1, CATCH_UP, 1 + limits.max_drafts, 16, 64, 512, limits.max_model_len})
    batches = sorted({1, min(8, limits.max_num_seqs), limits.max_num_seqs})
    keys = [GraphKey(length, batch) for length in lengths for batch in batches]
    return [key for key in keys if key.num_tokens <= limits.max_num_tokens]


def text_config(loaded: LoadedModel) -> Any:
    """The part of a config that describes the language model."""
    return cast("Any", loaded.config).get_text_config()


def vocab_size(loaded: LoadedModel) -> int:
    """Rows of logits."""
    return text_config(loaded).vocab_size


def _silent(what: str, done: int, of: int) -> None:
    pass


def _load(source: str, config: EngineConfig, device: torch.device, say: Progress) -> LoadedModel:
    dtype = DTYPES[config.dtype] if config.dtype else None
    loaded = load_model(
        source,
        device=device,
        dtype=dtype,
        attn_implementation=NAME,
        progress=lambda what: say(what, 0, 0),
    )
    if config.join_projections:
        join_projections(loaded.model)
        if device.type == "cuda":
            gate_joined(loaded.model)
    use_row_linear(loaded.model)
    return loaded


def _check_vocabularies(target: LoadedModel, draft: LoadedModel) -> None:
    sizes = vocab_size(target), vocab_size(draft)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft model {draft.name} has a vocabulary of {sizes[1]}, "
            f"the target {target.name} one of {sizes[0]}"
        )
    if target.tokenizer is not None and draft.tokenizer is not None:
        ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        wrong = next((token for token, index in ours.items() if theirs.get(token) != index), None)
        if wrong is not None:
            raise ValueError(
                f"draft model {draft.name} and target {target.name} number the token {wrong!r} "
                f"differently: {theirs.get(wrong)} and {ours[wrong]}"
            )


def _size(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    say: Progress,
) -> tuple[Limits, Layers, Layers]:
    on_gpu = device.type == "cuda"
    max_num_seqs = config.max_num_seqs or (64 if on_gpu else 16)
    max_num_tokens = config.max_num_batched_tokens or (8192 if on_gpu else 1024)
    if max_num_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {max_num_tokens} must be at least "
            f"max_num_seqs {max_num_seqs}: every sequence runs a token a step"
        )
    context = _context(config, [target] + ([draft] if draft else []))
    max_drafts = config.speculative.num_drafts if config.speculative else 0
    say("profiling memory", 0, 0)
    vocab = vocab_size(target)
    layers, draft_layers = _profile(
        [target.model] + ([draft.model] if draft else []), min(max_num_tokens, context), vocab
    )
    shapes = [*layers.values(), *draft_layers.values()]
    logits = max_num_seqs * (1 + max_drafts) * vocab * 4 * SAMPLING_COPIES
    budget = _cache_bytes(config, device, logits)
    one_page = page_bytes(shapes, config.page_size)
    wanted = -(-context // config.page_size)
    num_pages = min(budget // one_page, wanted * max_num_seqs)
    if num_pages < 1 or (num_pages < wanted and config.max_model_len is not None):
        raise ValueError(
            f"a sequence of max_model_len {context} needs {wanted * one_page / GIB:.2f} GiB of "
            f"cache, there are {budget / GIB:.2f} GiB; give a smaller max_model_len or more memory"
        )
    context = min(context, num_pages * config.page_size)
    limits = Limits(
        context, max_num_seqs, max_num_tokens, config.page_size, int(num_pages), max_drafts
    )
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
def _profile(models: list[Any], num_tokens: int, vocab_size: int) -> tuple[Layers, Layers]:
    """Run every model once over the largest step; their layers."""
    found = [find_layers(model, num_tokens, vocab_size) for model in models]
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


def _bind(
    loaded: LoadedModel,
    layers: Layers,
    limits: Limits,
    unseen: torch.Tensor,
    scorer: Scorer,
) -> Runner:
    shapes: list[LayerShape] = list(layers.values())
    caches = allocate_layers(shapes, limits.num_pages, limits.page_size, unseen.device)
    width = 1 + limits.max_drafts
    seqs = limits.max_num_seqs * (width if scorer is Scorer.BATCH_EXPANSION else 1)
    decoding = limits.max_num_seqs * max(width, CATCH_UP)
    inputs = [
        StepInputs(
            max_num_tokens=num_tokens,
            max_num_seqs=seqs,
            max_num_pages=-(-(limits.max_model_len + limits.max_drafts) // limits.page_size),
            device=unseen.device,
        )
        for num_tokens in (decoding, limits.max_num_tokens + decoding)
    ]
    return Runner(loaded.model, layers, caches, inputs, unseen, scorer)
