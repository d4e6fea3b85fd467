"""anabranch: attention as partial states and one exact merge."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anabranch.requirements import check_versions

if TYPE_CHECKING:
    from anabranch.append import append_kv
    from anabranch.attend import attend
    from anabranch.compositions.cascade import Cascade, attend_cascade, make_cascade
    from anabranch.compositions.latent_prompt import attend_latent_prompt
    from anabranch.compositions.quantised_prompt import attend_quantised_prompt
    from anabranch.compositions.selectors import (
        PageBounds,
        bound_pages,
        extend_bounds,
        select_pages,
        select_recent,
        select_top_keys,
    )
    from anabranch.compositions.tree import DraftTree, make_draft_tree
    from anabranch.compositions.up_projection import UpProjection
    from anabranch.keys import DenseKV, LatentKV, PagedKV, RaggedKV, SelectedKV
    from anabranch.llm.engine.llm import LLM
    from anabranch.llm.sampling.params import SamplingParams
    from anabranch.merge import merge
    from anabranch.plan import Plan, make_plan
    from anabranch.state import AttentionState

__all__ = [
    "LLM",
    "AttentionState",
    "Cascade",
    "DenseKV",
    "DraftTree",
    "LatentKV",
    "PageBounds",
    "PagedKV",
    "Plan",
    "RaggedKV",
    "SamplingParams",
    "SelectedKV",
    "UpProjection",
    "append_kv",
    "attend",
    "attend_cascade",
    "attend_latent_prompt",
    "attend_quantised_prompt",
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

check_versions()

_NAMES = {
    "append": ["append_kv"],
    "attend": ["attend"],
    "compositions.cascade": ["Cascade", "attend_cascade", "make_cascade"],
    "llm.engine.llm": ["LLM"],
    "keys": ["DenseKV", "LatentKV", "PagedKV", "RaggedKV", "SelectedKV"],
    "compositions.latent_prompt": ["attend_latent_prompt"],
    "compositions.quantised_prompt": ["attend_quantised_prompt"],
    "merge": ["merge"],
    "plan": ["Plan", "make_plan"],
    "llm.sampling.params": ["SamplingParams"],
    "compositions.selectors": [
        "PageBounds",
        "bound_pages",
        "extend_bounds",
        "select_pages",
        "select_recent",
        "select_top_keys",
    ],
    "state": ["AttentionState"],
    "compositions.tree": ["DraftTree", "make_draft_tree"],
    "compositions.up_projection": ["UpProjection"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


class _Package(ModuleType):
    """Keeps `attend` and `merge` functions when the modules of the same names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Names are imported when asked for: the command line needs no torch to print its help."""
    if name not in _MODULES:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(import_module(f"anabranch.{_MODULES[name]}"), name)
    setattr(sys.modules[__name__], name, value)  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
