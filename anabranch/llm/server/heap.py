"""Memory of large requests goes back to the system when they are over."""

from __future__ import annotations

import contextlib
import ctypes
import sys

MMAP_THRESHOLD = -3  # of mallopt(3)
MMAP_BYTES = 256 << 10


def return_large_blocks() -> None:
    """Fix the size from which glibc maps a block by itself.

    By default glibc raises it to the size of what was freed, up to 32 MiB. Later blocks of that
    size then come from heaps, where one small block on top keeps all of them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, MMAP_BYTES)
