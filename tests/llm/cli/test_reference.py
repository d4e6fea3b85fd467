"""The reference of options is what the code gives."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("fastapi")

from reference import PATH, reference

ROOT = Path(__file__).resolve().parents[3]


def test_the_reference_is_current() -> None:
    assert (ROOT / PATH).read_text() == reference(), "run make docs"


def test_every_option_is_explained() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert not [row for row in rows if row.endswith("|  |")]
