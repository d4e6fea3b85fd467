"""Every example runs, and so does every Python block of the README."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README_BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.stem)
def test_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_readme_has_an_example() -> None:
    assert README_BLOCKS


@pytest.mark.parametrize("block", README_BLOCKS, ids=range(len(README_BLOCKS)))
def test_readme_block_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
