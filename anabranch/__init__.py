"""anabranch: attention as partial states and one exact merge."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.cascade import Cascade, attend_cascade, make_cascade
from anabranch.keys import DenseKV, PagedKV, RaggedKV, SelectedKV
from anabranch.merge import merge
from anabranch.plan import Plan, make_plan
from anabranch.selectors import (
    PageBounds,
    bound_pages,
    extend_bounds,
    select_pages,
    select_recent,
    select_top_keys,
)
from anabranch.state import AttentionState
from anabranch.tree import DraftTree, make_draft_tree

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "AttentionState",
    "Cascade",
    "DenseKV",
    "DraftTree",
    "PageBounds",
    "PagedKV",
    "Plan",
    "RaggedKV",
    "SamplingParams",
    "SelectedKV",
    "append_kv",
    "attend",
    "attend_cascade",
    "bound_pages",
    "extend_bounds",
    "make_cascade",
    "make_draft_tree",
    "make_plan",
    "merge",
    "select_pages",
    "select_recent",
    "select_top_keys",
]
__version__ = "0.1.0"

_ENGINE = {"LLM": "engine.llm", "SamplingParams": "sampling.params"}  # needs anabranch[engine]


def __getattr__(name: str) -> Any:
    """The engine's names are imported when asked for: attention alone needs no transformers."""
    if name not in _ENGINE:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    return getattr(import_module(f"anabranch.{_ENGINE[name]}"), name)
