"""anabranch: attention as partial states and one exact merge."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.append import append_kv
    from anabranch.attend import attend
    from anabranch.engine.llm import LLM
    from anabranch.engine.sampling_params import SamplingParams
    from anabranch.keys import DenseKV, PagedKV, RaggedKV
    from anabranch.merge import merge
    from anabranch.plan import Plan, make_plan
    from anabranch.state import AttentionState

__all__ = [
    "LLM",
    "AttentionState",
    "DenseKV",
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

_MODULES = {
    "LLM": "engine.llm",
    "AttentionState": "state",
    "DenseKV": "keys",
    "PagedKV": "keys",
    "Plan": "plan",
    "RaggedKV": "keys",
    "SamplingParams": "engine.sampling_params",
    "append_kv": "append",
    "attend": "attend",
    "make_plan": "plan",
    "merge": "merge",
}


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
    return getattr(import_module(f"anabranch.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
