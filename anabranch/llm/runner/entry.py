"""A section of an engine's step, and how its decodes attend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anabranch.compositions.sections import Section
from anabranch.keys import KeySource
from anabranch.llm.runner.kv_cache import LayerCache
from anabranch.llm.runner.step_layout import WHOLE, DecodeWay


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Section):
    """A section, and the way of its sequences."""

    way: DecodeWay = WHOLE  # in layers without a window

    def keys(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> KeySource:
        """The keys of these sequences, given the step's new ones.

        New keys are read as they are only where the cache holds the same numbers: what a token
        attends to does not depend on how its prompt was cut into steps.
        """
        if self.is_fresh and cache.is_plain:
            return self.new_keys(k, v)
        return cache.keys(self.page_table, self.seq_lens)
