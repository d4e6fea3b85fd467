"""Memory that loading needed: what is given back, and what is kept."""

from __future__ import annotations

import sys

import pytest
import torch

from anabranch.llm.models.spent_memory import (
    UNCHANGED,
    library_mappings,
    release_spent_memory,
)

HEADER = "7f00-8f00 {flags} 00001000 fe:00 12 {path}\n"
SIZES = "Size: 4 kB\nRss: 3 kB\nPss: 3 kB\nAnonymous: {changed} kB\nVmFlags: rd ex\n"


def found(flags: str, path: str = "/lib/a b.so", changed: int = 0) -> list[tuple[str, ...]]:
    return UNCHANGED.findall((HEADER + SIZES).format(flags=flags, path=path, changed=changed))


def test_only_unchanged_files_that_are_not_written_are_found() -> None:
    assert found("r-xp") == found("r--p") == [("7f00", "8f00", "/lib/a b.so", "3")]
    assert not found("rw-p") and not found("rwxp") and not found("r--s") and not found("---p")
    assert not found("r-xp", changed=4) and not found("r-xp", path="[vdso]")
    both = (HEADER + SIZES) * 2
    text = both.format(flags="r-xp", path="/a", changed=4)
    assert not UNCHANGED.findall(text)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pages_of_libraries_are_released_and_come_back() -> None:
    x = torch.randn(8, 8)
    expected = (x @ x).softmax(1)
    before = sum(each.resident for each in library_mappings())
    release_spent_memory()
    after = sum(each.resident for each in library_mappings())
    assert after < before / 2
    assert torch.equal((x @ x).softmax(1), expected)
