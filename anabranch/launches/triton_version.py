"""Which Triton is installed, and entries of tables by its version."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TypeVar

Version = tuple[int, int]
Value = TypeVar("Value")

OLDEST: Version = (3, 6)


def installed() -> Version:
    """Triton's, by its metadata, for CPUs need it not; the oldest where there is none."""
    try:
        found = version("triton")
    except PackageNotFoundError:  # of another distribution, or of none
        if find_spec("triton") is None:
            return OLDEST
        found = str(import_module("triton").__version__)
    major, minor = map(int, found.split(".")[:2])
    return major, minor


TRITON = installed()


def since(table: dict[Version, Value], version: Version = TRITON) -> Value:
    """The entry of a version: that of the last one in the table which is not newer."""
    return table[max(first for first in table if first <= version)]
