"""Memory that loading a model needed and running it does not, given back to the system."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

MAPS = Path("/proc/self/smaps")  # of Linux
# A file mapped for reading of which no page was changed, relocated ones included.
UNCHANGED = re.compile(
    r"^(\w+)-(\w+) r-[x-]p .*? (/.*)\n(?:\w+: .*\n)*?Rss: +(\d+) kB\n"
    r"(?:\w+: .*\n)*?Anonymous: +0 kB$",
    re.MULTILINE,
)


class LibraryMapping(NamedTuple):
    """A part of a library in memory."""

    start: int
    size: int
    resident: int  # bytes


def release_spent_memory() -> None:
    """Return freed blocks of the C heap, and what importing torch has read of its libraries.

    Pages that are read again are mapped again from the page cache, 16 at a time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    for start, size, _ in library_mappings():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def library_mappings() -> Iterator[LibraryMapping]:
    """Those of torch's libraries that hold nothing but the file."""
    text = MAPS.read_text() if MAPS.is_file() else ""
    for start, stop, path, resident in UNCHANGED.findall(text):
        if Path(path).is_relative_to(Path(torch.__file__).parent):
            size = int(stop, 16) - int(start, 16)
            yield LibraryMapping(int(start, 16), size, int(resident) << 10)
