"""Options of an engine, checked where they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from anabranch.compositions.tree import MAX_NODES
from anabranch.llm.runner.kv_cache import CacheFormats, parse_cache_formats
from anabranch.llm.runner.sparse_decode import SparseConfig, sparse_config
from anabranch.llm.runner.step_layout import Scorer

ACTIVATIONS = ("int8", "float32")  # the values of models.Activations, which needs transformers
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
METHODS = ("ngram", "draft")
MAX_CHAIN = 32  # drafts that follow each other
MAX_WIDTH = 16  # siblings in a tree of drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted and verified."""

    method: str = "ngram"  # or "draft": a smaller model of the same vocabulary
    model: str | None = None  # the draft model
    num_drafts: int = 4  # at most, for a sequence and step
    tree_width: int = 1  # drafts that may follow the same token; 1 for a chain
    scorer: Scorer = Scorer.MULTI_QUERY  # how drafts are attended to
    adaptive: bool = True  # fewer drafts, or none, when they do not pay
    max_ngram: int = 4  # tokens at the end of a sequence that are looked up
    min_ngram: int = 2  # the fewest of them

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if (self.model is None) == (self.method == "draft"):
            need = "needs" if self.method == "draft" else "takes no"
            raise ValueError(f"method {self.method!r} {need} model, got {self.model!r}")
        for name in ("num_drafts", "tree_width", "max_ngram", "min_ngram"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        if not 1 <= self.tree_width <= MAX_WIDTH:
            raise ValueError(f"tree_width must be from 1 to {MAX_WIDTH}, got {self.tree_width}")
        most = MAX_NODES - 1 if self.has_trees else MAX_CHAIN  # the last token is a node too
        if not 1 <= self.num_drafts <= most:
            raise ValueError(f"num_drafts must be from 1 to {most}, got {self.num_drafts}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram must be from 1 to max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )
        object.__setattr__(self, "scorer", Scorer(self.scorer))
        if self.has_trees and self.scorer is not Scorer.MULTI_QUERY:
            raise ValueError(
                f"tree_width {self.tree_width} needs scorer {Scorer.MULTI_QUERY.value!r}: "
                f"{self.scorer.value!r} scores tokens that follow each other"
            )

    @property
    def has_trees(self) -> bool:
        return self.tree_width > 1


def speculative_config(given: Any) -> SpeculativeConfig | None:
    """From its options, or, as the command line has it, from the name of a method or "off"."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        return None if given == "off" else SpeculativeConfig(method=given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"speculative must be a method, its options or SpeculativeConfig, got {given!r:.80}"
        )
    options = dict(cast("Mapping[str, Any]", given))
    known = {field.name for field in fields(SpeculativeConfig)}
    if unknown := sorted(set(map(str, options)) - known):
        raise ValueError(f"unknown options of speculative: {', '.join(unknown)}")
    return SpeculativeConfig(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything about an engine but its requests. None leaves a choice to the device."""

    model: str = "smollm2"  # or a directory, a .gguf file, a hub id, dummy:CONFIG
    device: str | None = None  # cpu or cuda; the best there is
    dtype: str | None = None  # or "auto": 16 bits on a GPU; a GGUF file stays quantised
    activations: str = "int8"  # inputs of products with weights in such formats, or "float32"
    max_model_len: int | None = None  # tokens of a sequence; the model's own limit by default
    max_num_seqs: int | None = None  # running at once: 64 on a GPU, 16 on a CPU
    max_num_batched_tokens: int | None = None  # in a step: 8192 on a GPU, 1024 on a CPU
    page_size: int = 16  # tokens of a page of the cache
    gpu_memory_utilization: float = 0.9  # share of the GPU that is used
    kv_cache_gib: float | None = None  # what remains of a GPU, or 1 on a CPU
    kv_cache_dtype: str = "auto"  # the model's; or a format, or one each as "q8_0/fp8"
    prefix_caching: bool = True  # reuse keys and values of equal prefixes
    cascade: bool | None = None  # shared pages read once; None: on a GPU, where that pays
    speculative: SpeculativeConfig | None = None  # drafts, verified at once
    sparse: SparseConfig | None = None  # decode steps read a part of long contexts: other tokens
    cuda_graphs: bool = True  # replay captured steps on a GPU
    compile: bool | None = None  # decoder layers; by default on a GPU from a billion weights on
    join_projections: bool = True  # one product for q, k, v, and one for gate and up
    fused_merge: bool = True  # parts of attention may be merged in the launch that makes them
    max_workspace_mib: float = 256  # for keys that prompts expand at a time: latent, quantised
    seed: int | None = None  # of requests that give none
    generation_config: str = "auto"  # "none": no sampling defaults from the model's file
    tensor_parallel: int = 1  # processes, one a GPU, over which the weights are cut
    context_parallel: int = 1  # processes, one a GPU, over which the pages of the cache are dealt

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative", speculative_config(self.speculative))
        object.__setattr__(self, "sparse", sparse_config(self.sparse))
        if self.dtype not in (None, "auto", *DTYPES):
            names = ", ".join(("auto", *DTYPES))
            raise ValueError(f"dtype must be one of {names}, got {self.dtype!r}")
        if self.activations not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"activations must be one of {names}, got {self.activations!r}")
        parse_cache_formats(self.kv_cache_dtype)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._check_ranks()
        self._check_ways()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ValueError(f"kv_cache_gib must be above 0, got {self.kv_cache_gib}")
        if not self.max_workspace_mib > 0:
            raise ValueError(f"max_workspace_mib must be above 0, got {self.max_workspace_mib}")
        if self.generation_config not in ("auto", "none"):
            raise ValueError(
                f"generation_config must be 'auto' or 'none', got {self.generation_config!r}"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must have 64 bits, got {self.seed}")

    def _check_ways(self) -> None:
        """Refuse ways to attend that exclude each other."""
        if self.cascade not in (None, True, False):
            raise ValueError(f"cascade must be True, False or None, got {self.cascade!r}")
        if self.cascade and not self.prefix_caching:
            raise ValueError("cascade=True needs prefix_caching=True: nothing else shares pages")
        if self.sparse is not None and self.speculative is not None:
            raise ValueError(
                f"sparse={self.sparse.method!r} and speculative={self.speculative.method!r}: "
                "drafts are verified by attention to whole contexts, so use one of the two"
            )
        if (self.sparse or self.cascade) and self.context_parallel > 1:
            name = "sparse" if self.sparse else "cascade=True"
            raise ValueError(
                f"{name} needs whole pages, got context_parallel={self.context_parallel}"
            )

    def _check_ranks(self) -> None:
        for name in ("tensor_parallel", "context_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if min(self.tensor_parallel, self.context_parallel) > 1:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} and context_parallel "
                f"{self.context_parallel} cannot be combined: one of them must be 1"
            )
        if self.deals_context and not self.cache_formats.is_plain:
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} and context_parallel "
                f"{self.context_parallel} cannot be combined: dealt pages hold plain keys"
            )

        if self.num_ranks > 1 and self.speculative and self.speculative.has_trees:
            raise ValueError(
                f"tree_width {self.speculative.tree_width} needs one rank, got {self.num_ranks}: "
                "the keys of accepted drafts are moved on one device"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that run the model."""
        return self.tensor_parallel * self.context_parallel

    @property
    def deals_context(self) -> bool:
        """Whether ranks share the keys of a sequence, and not the weights."""
        return self.context_parallel > 1

    @property
    def cache_formats(self) -> CacheFormats:
        """Of keys and values, by `kv_cache_dtype`."""
        return parse_cache_formats(self.kv_cache_dtype)

    def resolve_device(self) -> torch.device:
        """The device asked for, or the best there is."""
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if name.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {name!r}")
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {name!r} was asked for, but torch sees no GPU")
        return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device
