"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from anabranch.llm.models.spent_memory import release_spent_memory

BLOCKS, SIZE = 1 << 15, 1 << 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_blocks_below_one_that_is_kept_are_returned() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks[:-1]:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    release_spent_memory()
    assert psutil.Process().memory_info().rss < before - BLOCKS * SIZE // 2
    libc.free(blocks[-1])
