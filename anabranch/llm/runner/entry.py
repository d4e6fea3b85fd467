"""Attention from some tokens of a step to one set of keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anabranch.keys import KeySource, RaggedKV
from anabranch.llm.runner.kv_cache import LayerCache
from anabranch.llm.runner.step_layout import WHOLE, DecodeWay


class Entry(NamedTuple):
    """Neighbouring sequences of similar query lengths, their keys, and which of them are seen.

    The layer adds the other rules: scale, window, softcap and sinks. The lengths of an entry count
    its own keys only, so that a shared prefix and what follows it are two entries over the same
    tokens.
    """

    tokens: slice
    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], from 0
    seq_lens: torch.Tensor  # int32 [num_seqs], with the tokens of this step
    page_table: torch.Tensor  # int32 [num_seqs, max_pages]
    is_fresh: bool = False  # all keys of these sequences are new: pages need not be read
    causal: bool = True  # False: every token sees all of these keys, which come before it
    tree_mask: torch.Tensor | None = None  # bool [num_tokens, width], for drafts that form a tree
    way: DecodeWay = WHOLE  # how these sequences attend in layers without a window

    def keys(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> KeySource:
        """The keys of these sequences, given the step's new ones.

        New keys are read as they are only where the cache holds the same numbers: what a token
        attends to does not depend on how its prompt was cut into steps.
        """
        if self.is_fresh and cache.is_plain:
            return RaggedKV(k[self.tokens], v[self.tokens], self.cu_seqlens_q)
        return cache.keys(self.page_table, self.seq_lens)
