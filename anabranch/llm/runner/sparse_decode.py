"""Sparse decoding: a token of a long context attends to some pages of it only.

Attention to a part of the keys is not attention to all of them, so the tokens of a model change.
Contexts of up to `keep` keys are attended to whole, by the same kernels as without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from anabranch.compositions.page_choice import choose_pages, kept_lens, new_bounds, renew_bounds
from anabranch.compositions.selectors import PageBounds
from anabranch.keys import PagedKV
from anabranch.llm.runner.kv_cache import LayerCache

METHODS = ("pages", "recent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig:
    """Which keys of a long context a decode step attends to."""

    method: str = "pages"  # those whose bounds score highest; "recent": the first and the last ones
    keep: int = 2048  # keys, in whole pages; contexts of up to so many are attended to whole
    sinks: int = 64  # of "recent": how many of the kept keys are the first ones

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"method of sparse must be one of {', '.join(METHODS)}, got {self.method!r}"
            )
        for name in ("keep", "sinks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of sparse must be an integer, got {value!r}")
        if self.keep < 1:
            raise ValueError(f"keep of sparse must be at least 1, got {self.keep}")
        if self.method == "recent" and not 0 <= self.sinks < self.keep:
            raise ValueError(
                f"sinks of sparse must be from 0 to keep - 1 = {self.keep - 1}, got {self.sinks}"
            )


def sparse_config(given: Any) -> SparseConfig | None:
    """From its options, or, as the command line has it, from the name of a method or "off"."""
    if given is None or isinstance(given, SparseConfig):
        return given
    if isinstance(given, str):
        return None if given == "off" else SparseConfig(method=given)
    if not isinstance(given, Mapping):
        raise ValueError(f"sparse must be a method, its options or SparseConfig, got {given!r:.80}")
    options = dict(cast("Mapping[str, Any]", given))
    known = {field.name for field in fields(SparseConfig)}
    if unknown := sorted(set(map(str, options)) - known):
        raise ValueError(f"unknown options of sparse: {', '.join(unknown)}")
    return SparseConfig(**options)


class SparseDecode:
    """The bounds of every layer's pages, and the choice among them."""

    def __init__(self, config: SparseConfig, caches: Sequence[LayerCache], page_size: int) -> None:
        self.config = config
        self.enabled = True  # off: contexts are attended to whole
        self._num_pages = -(-config.keep // page_size)
        self._num_sinks = -(-config.sinks // page_size)
        if config.method == "recent" and self._num_sinks >= self._num_pages:
            raise ValueError(
                f"sparse keeps {self._num_pages} pages of {page_size} keys, of which sinks "
                f"{config.sinks} would be {self._num_sinks}: none is left for recent keys"
            )
        if any(cache.k.data_ptr() == cache.v.data_ptr() != 0 for cache in caches):
            raise ValueError(
                f"sparse={config.method!r} needs keys apart from values, not latent rows"
            )
        self._bounds: dict[int, PageBounds] = {}
        if config.method == "pages":
            self._bounds = {cache.k.data_ptr(): new_bounds(cache.k) for cache in caches}

    def needed(self, longest: int) -> bool:
        """Whether a context of this many keys is too long to be attended to whole."""
        return self.enabled and longest > self.config.keep

    def observe(self, cache: LayerCache, slot_mapping: torch.Tensor) -> None:
        """Take note of keys that a layer has just kept."""
        bounds = self._bounds.get(cache.k.data_ptr())
        if bounds is not None:
            renew_bounds(bounds, cache.k, slot_mapping)

    def choose(
        self,
        q: torch.Tensor,
        keys: PagedKV,
        cache: LayerCache,
        before: PagedKV | None,
    ) -> tuple[torch.Tensor, PagedKV]:
        """Queries [.., heads, dim] and the keys they attend to, for one token a sequence.

        `before` are the keys that another layer of the step and of the same shape was given.
        """
        if self.config.method == "pages":
            bounds, lens = self._bounds[cache.k.data_ptr()], before.seq_lens if before else None
            return choose_pages(q, keys, bounds, num_pages=self._num_pages, lens=lens)
        if before is None:
            return q, self._recent(keys)
        return q, replace(keys, page_table=before.page_table, seq_lens=before.seq_lens)

    def _recent(self, keys: PagedKV) -> PagedKV:
        """The first pages and the last ones."""
        size, places = keys.page_size, torch.arange(self._num_pages, device=keys.device)
        skipped = ((keys.seq_lens.long() + size - 1) // size - self._num_pages).clamp(min=0)
        places = places + torch.where(places < self._num_sinks, 0, skipped[:, None])
        table = keys.page_table.gather(1, places.clamp(max=keys.page_table.shape[1] - 1))
        lens = kept_lens(keys.seq_lens, self._num_pages, size)
        return replace(keys, page_table=table, seq_lens=lens)
