"""From options to a model that runs: loading, sizing, binding to the cache, capturing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch

from anabranch.distributed.rank_group import RankGroup, check_agreement, make_on_all
from anabranch.launches.compile_ahead import compiling_ahead
from anabranch.llm.engine.attention_ways import decode_keys, shared_prefixes
from anabranch.llm.engine.config import DTYPES, EngineConfig
from anabranch.llm.engine.drafters import check_windows, make_chain
from anabranch.llm.engine.limits import Limits, size, text_config, vocab_size
from anabranch.llm.models import Activations, LoadedModel, load_model
from anabranch.llm.models.packed_decoder import PackedDecoder
from anabranch.llm.runner.dealt_step import DealtPages
from anabranch.llm.runner.graphs import GraphKey, Progress, StepChoice, graph_batches, prompt_sizes
from anabranch.llm.runner.kv_cache import LayerShape, allocate_layers
from anabranch.llm.runner.model_attention import NAME, Layers, register
from anabranch.llm.runner.model_runner import ModelRunner
from anabranch.llm.runner.sparse_decode import SparseConfig, SparseDecode
from anabranch.llm.runner.step_inputs import StepInputs
from anabranch.llm.runner.step_layout import Scorer
from anabranch.llm.sampling.logits import draw
from anabranch.llm.sampling.params import SamplingRows
from anabranch.llm.speculative.adaptive import draft_numbers
from anabranch.llm.speculative.draft_chain import MAX_DEPTH, DraftChain, TreeChain, chain_keys
from anabranch.llm.speculative.draft_inputs import CATCH_UP

log = logging.getLogger("anabranch")
COMPILED_WEIGHTS = 1_000_000_000
PACKAGES = ("anabranch", "torch", "transformers")  # that must be the same on every rank


@dataclass(frozen=True, slots=True)
class Built:
    """An engine's parts."""

    target: LoadedModel
    device: torch.device
    limits: Limits
    runner: ModelRunner
    draft: DraftChain | None
    rows: SamplingRows  # parameters of the running requests
    unseen: torch.Tensor  # int64 [max_num_seqs, 1 + max_drafts]: tokens the host has not seen
    saturated: torch.Tensor | None  # int32 [1]: counted while the caches are quantised


def build(
    config: EngineConfig, progress: Progress | None = None, ranks: RankGroup | None = None
) -> Built:
    """Load, size and capture; among ranks, what this one runs. Rank 0 alone has the draft model."""
    register()
    device = config.resolve_device()
    if device.type == "cpu" and config.dtype not in (None, "float32"):
        log.warning("dtype %s on a CPU takes about twice the time of float32", config.dtype)
    say = progress or _silent
    target, draft = make_on_all(ranks, lambda: _load_models(config, device, say, ranks))
    if ranks is not None:
        check_agreement(ranks, **_identity(target))
    speculative = config.speculative
    if speculative and speculative.has_trees:
        check_windows([target] if draft is None else [target, draft])
    limits, layers, draft_layers = size(config, target, draft, device, say, ranks)
    unseen = torch.zeros(
        limits.max_num_seqs, 1 + limits.max_drafts, dtype=torch.int64, device=device
    )
    scorer = speculative.scorer if speculative else Scorer.MULTI_QUERY
    fused = config.fused_merge
    saturated = None
    if not config.cache_formats.is_plain:
        saturated = torch.zeros(1, dtype=torch.int32, device=device)
    dealt = None
    if ranks is not None and config.deals_context:
        dealt = DealtPages(ranks, config.page_size)
    trees = speculative is not None and speculative.has_trees
    given = limits, unseen, scorer, fused, saturated, dealt, config.sparse
    options: Any = {"trees": trees, "max_workspace_mib": config.max_workspace_mib}
    runner = _bind(target, layers, *given, **options)
    if dealt is None:
        runner.choice.prefixes = shared_prefixes(config, limits, layers, device)
    rows = SamplingRows(limits.max_num_seqs, vocab_size(target))
    chain = None
    if draft is not None:
        scorer = Scorer.MULTI_QUERY
        sizes = limits, unseen, scorer, fused, saturated
        drafter = _bind(draft, draft_layers, *sizes, **options)
        width = speculative.tree_width if speculative else 1
        chain = make_chain(drafter, limits, unseen, rows, width)
    runners = [runner] if chain is None else [runner, chain.runner]
    if device.type == "cuda":
        with compiling_ahead():
            for each in runners:
                each.warm_up(_shapes(limits), say)
    if _compiles(config, target, device):
        for each in runners:
            each.compile_layers()
    if device.type == "cuda":
        for each in runners:
            each.warm_up(_shapes(limits), say)
        draw(torch.zeros(1, rows.vocab_size, device=device), unseen.new_zeros(1))
        if trees:
            none = unseen.new_zeros(1, 1)
            for each in runners:
                each.rows.move(none, none, none[0])
    if config.cuda_graphs and device.type == "cuda":
        _capture(config, limits, runner, chain, say)
    return Built(target, device, limits, runner, chain, rows, unseen, saturated)


def _capture(
    config: EngineConfig,
    limits: Limits,
    runner: ModelRunner,
    chain: DraftChain | None,
    say: Progress,
) -> None:
    batches = graph_batches(limits.max_num_seqs)
    runner.capture(decode_keys(limits, runner.choice), say)
    runner.capture_prompts(prompt_sizes(min(limits.max_num_tokens, limits.max_model_len)), say)
    if chain is not None:
        adaptive = config.speculative is not None and config.speculative.adaptive
        numbers = draft_numbers(limits.max_drafts)[1:] if adaptive else [limits.max_drafts]
        if isinstance(chain, TreeChain):
            numbers = draft_numbers(min(limits.max_drafts, MAX_DEPTH))[1:]
        chain.capture(chain_keys(numbers, batches), say, pool=runner.graphs.pool)


def _compiles(config: EngineConfig, target: LoadedModel, device: torch.device) -> bool:
    """Twenty seconds at the start are worth it for models that take seconds to load."""
    if config.compile is not None:
        return config.compile
    model = cast("Any", target.model)  # on a GPU, of transformers
    return device.type == "cuda" and model.num_parameters() >= COMPILED_WEIGHTS


def _shapes(limits: Limits) -> list[GraphKey]:
    """Steps that select every kind of tile: few and many queries of few and many sequences."""
    longest = min(limits.max_model_len, limits.max_num_tokens)
    lengths = sorted({1, CATCH_UP, 1 + limits.max_drafts, 16, 64, 512, longest})
    batches = sorted({1, min(8, limits.max_num_seqs), limits.max_num_seqs})
    keys = [GraphKey(length, batch) for length in lengths for batch in batches]
    return [key for key in keys if key.num_tokens <= limits.max_num_tokens]


def _silent(what: str, done: int, of: int) -> None:
    pass


def _load_models(
    config: EngineConfig, device: torch.device, say: Progress, ranks: RankGroup | None
) -> tuple[LoadedModel, LoadedModel | None]:
    """The target, or this rank's part of it, and the draft model."""
    cuts = ranks is not None and not config.deals_context
    target = _load(config.model, config, device, say, cut=_shard if cuts else None)
    speculative = config.speculative
    if speculative is None or speculative.model is None or (ranks is not None and ranks.rank):
        return target, None
    draft = _load(speculative.model, config, device, say)
    _check_vocabularies(target, draft)
    return target, draft


def _shard(model: Any) -> None:
    from anabranch.llm.parallel.shard_model import shard_model

    shard_model(model)


def _identity(target: LoadedModel) -> dict[str, object]:
    """What must be the same on every rank."""
    versions = {name: import_module(name).__version__ for name in PACKAGES}
    found: dict[str, object] = {f"the version of {name}": versions[name] for name in PACKAGES}
    config = cast("dict[str, Any]", cast("Any", target.config).to_dict())  # of transformers
    settings = {k: v for k, v in config.items() if k != "_name_or_path"}
    text = repr(sorted(settings.items())).encode()
    return found | {"the model's config": hashlib.sha256(text).hexdigest()[:16]}


def _load(
    source: str,
    config: EngineConfig,
    device: torch.device,
    say: Progress,
    cut: Callable[[Any], object] | None = None,
) -> LoadedModel:
    dtype = DTYPES.get(config.dtype or "auto")
    try:
        loaded = load_model(
            source,
            device=device,
            dtype=dtype,
            attn_implementation=NAME,
            progress=lambda what: say(what, 0, 0),
            cut=cut,
            activations=Activations(config.activations) if config.num_ranks == 1 else None,
            whole_layers=config.join_projections and not config.compile,
        )
    except KeyError as error:
        if error.args != (NAME,):
            raise
        raise ValueError(  # from a table of its own, before weights are read
            f"{source} has attention classes of its own and none for transformers' "
            "AttentionInterface, so its keys cannot be kept in pages"
        ) from error
    if not isinstance(loaded.model, PackedDecoder):
        from anabranch.llm.models.replaced_parts import replace_parts

        joins, most = config.join_projections, config.max_workspace_mib
        replace_parts(loaded.model, joins=joins, max_workspace_mib=most)
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


def _bind(
    loaded: LoadedModel,
    layers: Layers,
    limits: Limits,
    unseen: torch.Tensor,
    scorer: Scorer,
    fused_merge: bool,
    saturated: torch.Tensor | None,
    dealt: DealtPages | None = None,
    sparse: SparseConfig | None = None,
    *,
    trees: bool,
    max_workspace_mib: float,
) -> ModelRunner:
    shapes: list[LayerShape] = list(layers.values())
    sizes = (limits.num_pages, dealt.page_size if dealt else limits.page_size)
    caches = allocate_layers(shapes, *sizes, unseen.device, saturated)
    width = 1 + limits.max_drafts
    seqs = limits.max_num_seqs * (width if scorer is Scorer.BATCH_EXPANSION else 1)
    decoding = limits.max_num_seqs * max(width, CATCH_UP)
    inputs = [
        StepInputs(
            max_num_tokens=num_tokens,
            max_num_seqs=seqs,
            max_num_pages=limits.table_width,
            device=unseen.device,
            trees=trees,
        )
        for num_tokens in (decoding, limits.max_num_tokens + decoding)
    ]
    chooser = SparseDecode(sparse, caches, limits.page_size) if sparse else None
    return ModelRunner(
        loaded.model,
        layers,
        caches,
        inputs,
        unseen,
        scorer,
        fused_merge=fused_merge,
        dealt=dealt,
        choice=StepChoice(sparse=chooser, max_workspace_mib=max_workspace_mib),
        trees=trees,
    )


def eos_ids(built: Built) -> set[int]:
    """Tokens of the vocabulary that end a text, by the generation config and the tokenizer."""
    generation: Any = getattr(built.target.model, "generation_config", None)
    given: Any = getattr(generation, "eos_token_id", None)
    if given is None:
        given = text_config(built.target).eos_token_id
    ids: set[int] = {given} if isinstance(given, int) else set(given or ())
    of_tokenizer: Any = getattr(built.target.tokenizer, "eos_token_id", None)
    ids |= set() if of_tokenizer is None else {of_tokenizer}
    return {token for token in ids if 0 <= token < vocab_size(built.target)}
