"""Options that make an engine, the same in every tool."""

# ruff: noqa: RUF009 - `option` is a field

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anabranch.bench.engine.fields import check_choices, option

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.runner import Progress

SPECULATIVE = ("ngram", "draft", "off")
SCORERS = ("multi-query", "batch-expansion")
DEVICES = ("cuda", "cpu")
DTYPES = ("float32", "bfloat16", "float16")


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
        None, "float32 on a CPU, 16 bits on a GPU unless given.", choices=DTYPES
    )
    max_model_len: int | None = option(None, "Tokens of a sequence, prompt and output.")
    speculative: str = option("off", "Where drafts come from.", choices=SPECULATIVE)
    draft_model: str | None = option(None, "For --speculative draft: a model of one vocabulary.")
    num_drafts: int = option(4, "Draft tokens of a sequence and step, at most.")
    scorer: str = option("multi-query", "How drafts are scored.", choices=SCORERS)
    adaptive: bool = option(True, "Fewer drafts, or none, when they do not pay.")
    graphs: bool = option(True, "CUDA graphs of decoding steps.")
    fused_merge: bool = option(
        True, "Parts of attention are merged inside its kernel, not by a launch of their own."
    )
    compile: bool | None = option(
        None, "torch.compile of the decoder layers; by default on a GPU from 1e9 weights on."
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.device is not None and self.device.partition(":")[0] not in DEVICES:
            raise ValueError(f"--device must be {' or '.join(DEVICES)}, got {self.device!r}")
        if self.draft_model is not None and self.speculative != "draft":
            raise ValueError(f"--draft-model needs --speculative draft, not {self.speculative!r}")
        if self.speculative == "draft" and self.draft_model is None:
            raise ValueError("--speculative draft needs --draft-model")

    def make(self, progress: Progress | None = None, **more: Any) -> LLM:
        """The engine, loaded."""
        from anabranch.engine.llm import LLM

        return LLM(self.model, progress=progress, **(self.engine_config() | more))

    def engine_config(self) -> dict[str, Any]:
        """As `EngineConfig` calls them, without the model."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "speculative": self.speculative_config(),
            "cuda_graphs": self.graphs,
            "compile": self.compile,
            "fused_merge": self.fused_merge,
        }

    def speculative_config(self) -> dict[str, Any] | None:
        """As `SpeculativeConfig` calls them; None without speculation."""
        if self.speculative == "off":
            return None
        return {
            "method": self.speculative,
            "model": self.draft_model,
            "num_drafts": self.num_drafts,
            "scorer": self.scorer,
            "adaptive": self.adaptive,
        }

    def torch_device(self) -> torch.device:
        """The device asked for, or the best there is."""
        from anabranch.engine.config import EngineConfig

        return EngineConfig(device=self.device).resolve_device()

    def setting(self) -> str:
        """What distinguishes a run, in a few words."""
        words = [] if self.speculative == "off" else [f"{self.speculative} k={self.num_drafts}"]
        words += [self.scorer] if words else []
        words += [] if self.graphs else ["no graphs"]
        words += [] if self.fused_merge else ["merge apart"]
        words += ["compiled"] if self.compile else []
        return ", ".join(words) or "plain"


def release() -> None:
    """Give back the memory of an engine that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class BenchOptions(EngineOptions):
    """An engine, and where the results go."""

    out: Path | None = option(None, "Write the results as JSON, with the commit and the machine.")

    def sized(self, num_tokens: int, num_seqs: int) -> dict[str, Any]:
        """Engine options for sequences of this length, all running at once, nothing reused."""
        drafts = self.num_drafts if self.speculative != "off" else 0
        return {
            "max_model_len": self.max_model_len or num_tokens + drafts,
            "max_num_seqs": num_seqs,
            "prefix_caching": False,
        }
