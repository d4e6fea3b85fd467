"""anabranch: attention as partial states and one exact merge."""

from anabranch.append import append_kv
from anabranch.attend import attend
from anabranch.keys import DenseKV, PagedKV, RaggedKV
from anabranch.merge import merge
from anabranch.plan import Plan, make_plan
from anabranch.state import AttentionState

__all__ = [
    "AttentionState",
    "DenseKV",
    "PagedKV",
    "Plan",
    "RaggedKV",
    "append_kv",
    "attend",
    "make_plan",
    "merge",
]
__version__ = "0.1.0"
