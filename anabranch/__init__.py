"""anabranch: attention as partial states and one exact merge."""

from anabranch.keys import DenseKV, PagedKV, RaggedKV
from anabranch.merge import merge
from anabranch.state import AttentionState

__all__ = ["AttentionState", "DenseKV", "PagedKV", "RaggedKV", "merge"]
__version__ = "0.1.0"
