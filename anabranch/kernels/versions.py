"""What differs between the versions of Triton that this package supports.

Kernels and launchers take it from here (and Gluon's names from `gluon/versions.py`), so that a new
version is a new line of a table. CONTRIBUTING.md says what to run for one.
"""

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


# Whether the compiler takes products with 8 columns of operands made in registers, as codes loaded
# by pairs of keys are, on GPUs with tensor memory. From 3.8 on, TritonGPUOptimizeDotOperands fails.
PAIRS_IN_TENSOR_MEMORY = since({(3, 6): True, (3, 8): False})

# Whether Hopper multiplies by 8 columns in single warps, which take four dims next to each other
# from a thread. From 3.8 on it does in warpgroups, as by 16 columns: in the order of single warps
# keys would go through shared memory once more (556 and not 454 instructions a tile of int8).
NARROW_IN_WARPS = since({(3, 6): True, (3, 8): False})

# How many of up to 128 query columns Hopper's prompts keep in registers. 3.9 copies operands in
# registers before each product; with all queries that is more than a thread has: 756 and 854
# instructions a tile of 128 keys and dims in the two consumers, with 8 to local memory, against 733
# and 734 with queries in shared memory, and 726 in 3.6. H200, us: 1 x 1024 25.3 and not 26.9, 1 x
# 8192 928 and not 946 (895 in 3.6), 512 tokens beside 31 decodes 225 and not 232. That was before
# gluon's BARRIER_AFTER_CLEARING, and 64 columns have not been timed.
QUERY_COLUMNS = since({(3, 6): 128, (3, 9): 0})
