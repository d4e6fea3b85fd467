"""The formats of a cache's keys and values, as `kv_cache_dtype` names them."""

from __future__ import annotations

from typing import NamedTuple

from anabranch.keys.formats import FORMATS

AUTO = "auto"  # the dtype of the model
FORMAT_NAMES = {AUTO: "plain"} | {name: name for name in FORMATS if name != "plain"}


class CacheFormats(NamedTuple):
    """Names of store formats."""

    k: str = "plain"
    v: str = "plain"

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are kept as the model computes them."""
        return self.k == self.v == "plain"


PLAIN_CACHE = CacheFormats()


def parse_cache_formats(given: str) -> CacheFormats:
    """From "int8", or from "q8_0/fp8", where keys and values differ."""
    names = given.split("/")
    if len(names) > 2 or not all(name in FORMAT_NAMES for name in names):
        raise ValueError(
            f"kv_cache_dtype must be one of {', '.join(FORMAT_NAMES)}, or two of them as in "
            f"'q8_0/fp8' for keys and values, got {given!r}"
        )
    return CacheFormats(FORMAT_NAMES[names[0]], FORMAT_NAMES[names[-1]])
