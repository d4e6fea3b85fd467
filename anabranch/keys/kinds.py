"""The table of key sources, and sources as the arguments of a torch operator."""

from __future__ import annotations

import torch

from anabranch.keys.dense import DenseKV
from anabranch.keys.latent import LatentKV
from anabranch.keys.paged import PagedKV
from anabranch.keys.ragged import RaggedKV
from anabranch.keys.selected import SelectedKV
from anabranch.keys.source import KeySource

KINDS: dict[str, type[KeySource]] = {
    source.kind: source for source in (DenseKV, RaggedKV, PagedKV, LatentKV, SelectedKV)
}


def flatten_source(keys: KeySource) -> tuple[str, list[torch.Tensor], list[int]]:
    """A source as its kind, tensors and integers."""
    return keys.kind, list(keys.tensors().values()), keys.static()


def rebuild_source(kind: str, tensors: list[torch.Tensor], static: list[int]) -> KeySource:
    """The source that was flattened."""
    return KINDS[kind].rebuild(tensors, static)
