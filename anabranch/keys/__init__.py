"""Where keys and values live: the sources that `attend` reads, each of which describes itself."""

from anabranch.keys.columns import KeyColumns
from anabranch.keys.dense import DenseKV
from anabranch.keys.kinds import KINDS, flatten_source, rebuild_source
from anabranch.keys.latent import LatentKV
from anabranch.keys.paged import PagedKV, PagedSource
from anabranch.keys.ragged import RaggedKV
from anabranch.keys.selected import SelectedKV
from anabranch.keys.source import KeyLengths, KeySource
from anabranch.keys.view import (
    PLAIN,
    KeyLists,
    KeyStore,
    KeyView,
    ScaleStore,
    StoreFormat,
    store_of,
)

__all__ = [
    "KINDS",
    "PLAIN",
    "DenseKV",
    "KeyColumns",
    "KeyLengths",
    "KeyLists",
    "KeySource",
    "KeyStore",
    "KeyView",
    "LatentKV",
    "PagedKV",
    "PagedSource",
    "RaggedKV",
    "ScaleStore",
    "SelectedKV",
    "StoreFormat",
    "flatten_source",
    "rebuild_source",
    "store_of",
]
