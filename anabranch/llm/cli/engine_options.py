"""Options of an engine, the same in every command."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from anabranch.llm.cli.options import check_options, option

if TYPE_CHECKING:
    import torch

    from anabranch.llm.cli.progress import Progress
    from anabranch.llm.engine.llm import LLM

SPECULATIVE = ("ngram", "draft", "off")
DRAFTS = "Where drafts come from: ngram unless given, off with --sparse."
SPARSE = ("pages", "recent", "off")
SCORERS = ("multi-query", "batch-expansion")
DEVICES = ("cuda", "cpu")
DTYPES = ("auto", "float32", "bfloat16", "float16")
ACTIVATIONS = ("int8", "float32")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """A model and how it is run."""

    model: str = option(
        "smollm2",
        "smollm2, a transformers directory, a .gguf file, a hub id, or dummy:CONFIG "
        "(random weights; dummy:llama-3.1-8b).",
    )
    device: str | None = option(None, "cuda or cpu; the GPU if there is one.")
    dtype: str | None = option(
        None,
        "auto, unless given: 16 bits on a GPU, float32 on a CPU; a .gguf file stays quantised.",
        choices=DTYPES,
    )
    activations: str = option(
        "int8",
        "Inputs of products with a .gguf file's weights on a CPU; float32 is exact and slower.",
        choices=ACTIVATIONS,
    )
    max_model_len: int | None = option(None, "Tokens of a sequence, prompt and output.", at_least=1)
    max_num_batched_tokens: int | None = option(
        None, "Tokens of a step, at most: 8192 on a GPU, 1024 on a CPU.", at_least=1
    )
    page_size: int = option(16, "Tokens of a page of the KV cache.", at_least=1)
    kv_cache_gib: float | None = option(
        None, "Size of the KV cache: what remains of a GPU, 1 on a CPU.", above=0
    )
    kv_cache_dtype: str = option(
        "auto",
        "Format of the KV cache: auto (the model's dtype), fp8, fp8_tensor, int8, q8_0, or two of "
        "these for keys and values: q8_0/fp8.",
    )
    speculative: str | None = option("off", "Where drafts come from.", choices=SPECULATIVE)
    draft_model: str | None = option(None, "For --speculative draft: a model of one vocabulary.")
    num_drafts: int = option(4, "Draft tokens of a sequence and step, at most.")
    tree_width: int = option(
        1, "Drafts that may follow the same token: above 1, drafts form a tree.", at_least=1
    )
    scorer: str = option("multi-query", "How drafts are scored.", choices=SCORERS)
    adaptive: bool = option(True, "Fewer drafts, or none, when they do not pay.")
    graphs: bool = option(True, "CUDA graphs of decoding steps.")
    fused_merge: bool = option(
        True, "Parts of attention may be merged inside its kernel; off, by a launch of their own."
    )
    max_workspace_mib: float = option(
        256.0,
        "MiB for keys that prompts over a latent (DeepSeek) or quantised cache expand at a time.",
        above=0,
    )
    cascade: bool = option(
        True, "On a GPU, read pages once that sequences share, where that saves time."
    )
    sparse: str = option(
        "off", "Which keys of long contexts decode steps read; tokens change.", choices=SPARSE
    )
    sparse_keep: int = option(2048, "For --sparse: keys of a context that are read.", at_least=1)
    compile: bool | None = option(
        None, "torch.compile of the decoder layers; by default on a GPU from 1e9 weights on."
    )

    tensor_parallel: int = option(
        1, "Processes, one a GPU, over which the weights are cut.", at_least=1
    )
    context_parallel: int = option(
        1, "Processes, one a GPU, over which the pages of the KV cache are dealt.", at_least=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.device is not None and self.device.partition(":")[0] not in DEVICES:
            raise ValueError(f"--device must be {' or '.join(DEVICES)}, got {self.device!r}")
        if self.speculative is None:  # drafts by default, where they are possible
            object.__setattr__(self, "speculative", "ngram" if self.sparse == "off" else "off")
        if "off" not in (self.sparse, self.speculative):
            raise ValueError(
                f"--sparse {self.sparse} excludes --speculative {self.speculative}: "
                "drafts are verified by attention to whole contexts"
            )
        if self.draft_model is not None and self.speculative != "draft":
            raise ValueError(f"--draft-model needs --speculative draft, not {self.speculative!r}")
        if self.speculative == "draft" and self.draft_model is None:
            raise ValueError("--speculative draft needs --draft-model")

    def make(self, progress: Progress | None = None, **more: Any) -> LLM:
        from anabranch.llm.engine.llm import LLM

        return LLM(self.model, progress=progress, **(self.engine_config() | more))

    def engine_config(self) -> dict[str, Any]:
        """Keyword arguments of `EngineConfig`, without the model."""
        from anabranch.llm.engine.config import EngineConfig

        names = {each.name for each in fields(EngineConfig)} & {
            each.name for each in fields(ServingOptions) if each.name != "model"
        }
        return {name: getattr(self, name) for name in names & vars(self).keys()} | {
            "cuda_graphs": self.graphs,
            "cascade": None if self.cascade else False,
            "speculative": self.speculative_config(),
            "sparse": self.sparse_config(),
        }

    def sparse_config(self) -> dict[str, Any] | None:
        """Keyword arguments of `SparseConfig`; None where contexts are read whole."""
        if self.sparse == "off":
            return None
        return {"method": self.sparse, "keep": self.sparse_keep}

    def speculative_config(self) -> dict[str, Any] | None:
        """Keyword arguments of `SpeculativeConfig`; None without speculation."""
        if self.speculative == "off":
            return None
        same = ("num_drafts", "tree_width", "scorer", "adaptive")
        named = {"method": self.speculative, "model": self.draft_model}
        return named | {name: getattr(self, name) for name in same}

    def torch_device(self) -> torch.device:
        """The device asked for, or the best there is."""
        from anabranch.llm.engine.config import EngineConfig

        return EngineConfig(device=self.device).resolve_device()

    def setting(self) -> str:
        """What distinguishes a run, in a few words."""
        drafted = self.speculative != "off"
        parts = [f"{self.speculative} k={self.num_drafts}", self.scorer] if drafted else []
        parts += [f"trees of width {self.tree_width}"] if drafted and self.tree_width > 1 else []
        parts += [] if self.graphs else ["no graphs"]
        parts += [] if self.fused_merge else ["merge apart"]
        parts += [] if self.cascade else ["no cascades"]
        parts += [] if self.sparse == "off" else [f"sparse {self.sparse} {self.sparse_keep}"]
        parts += ["compiled"] if self.compile else []
        parts += [f"TP {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        parts += [f"CP {self.context_parallel}"] if self.context_parallel > 1 else []
        parts += [] if self.kv_cache_dtype == "auto" else [f"{self.kv_cache_dtype} cache"]
        return ", ".join(parts) or "plain"


@dataclass(frozen=True, kw_only=True)
class ServingOptions(EngineOptions):
    """An engine that many requests share."""

    max_num_seqs: int | None = option(
        None, "Sequences at once: 64 on a GPU, 16 on a CPU.", at_least=1
    )
    prefix_caching: bool = option(True, "Reuse the keys and values of equal prefixes.")
