"""anabranch: attention as partial states and one exact merge."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.keys import DenseKV, LatentKV, PagedKV, RaggedKV
from anabranch.merge import merge
from anabranch.plan import Plan, make_plan
from anabranch.state import AttentionState

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AttentionState",
    "DenseKV",
    "LatentKV",
    "PagedKV",
    "Plan",
    "RaggedKV",
    "SamplingParams",
    "append_kv",
    "attend",
    "make_plan",
    "merge",
]
__version__ = "0.1.0"

_ENGINE = {"LLM": "llm", "SamplingParams": "sampling_params"}  # needs anabranch[engine]


def __getattr__(name: str) -> Any:
    """The engine's names are imported when asked for: attention alone needs no transformers."""
    if name not in _ENGINE:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    return getattr(import_module(f"anabranch.engine.{_ENGINE[name]}"), name)
