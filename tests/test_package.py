"""The package's names are imported when they are asked for, and are what they seem."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import anabranch
from anabranch.integrations.vllm.compat import NEWEST, OLDEST
from anabranch.requirements import RANGES

ROOT = Path(anabranch.__file__).parents[1]
HEAVY = ("torch", "transformers", "numpy", "triton")


def run(script: str) -> str:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = f"import sys, anabranch; print([x for x in {HEAVY} if x in sys.modules])"
    assert run(script).strip() == "[]"


def test_a_function_is_not_replaced_by_its_module() -> None:
    script = "import anabranch, anabranch.attend, anabranch.merge, sys\n"
    for name in ("attend", "merge"):
        script += (
            f"function = anabranch.{name}\n"
            f"assert function is sys.modules['anabranch.{name}'].{name}\n"
            f"from anabranch import {name}\n"
            f"assert {name} is function and callable({name})\n"
        )
    run(script)


def test_every_name_is_found() -> None:
    run("from anabranch import *; assert callable(attend) and callable(merge) and DenseKV and LLM")
    assert {*anabranch.__all__, "__version__"} <= {*dir(anabranch)}
    for name in anabranch.__all__:
        assert getattr(anabranch, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = anabranch.attention  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("package", RANGES)
def test_versions_are_one_range(package: str) -> None:
    """What the package checks is what its installer is told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    (given,) = {x for x in [*project["dependencies"], *extras] if x.startswith(f"{package}>")}
    (oldest, newest) = RANGES[package]
    beyond = ".".join(map(str, (*newest[:-1], newest[-1] + 1)))
    assert given.startswith(f"{package}>={'.'.join(map(str, oldest))},<{beyond}")


def test_documents_name_the_same_versions() -> None:
    text = (ROOT / "README.md").read_text()
    for package, (oldest, newest) in RANGES.items():
        first, last = ".".join(map(str, oldest)), ".".join(map(str, newest))
        named = rf"{package} {first}( to {last}| or newer)".replace(".", r"\.")
        assert re.search(named, text, re.IGNORECASE), named
    first, last = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    assert f"vLLM {first} to {last}" in text
    assert f"vLLM {first} to {last}" in (ROOT / "docs" / "vllm.md").read_text()


def import_beside(tmp_path: Path, package: str, version: str) -> str:
    """What the import prints where this version of a package is installed."""
    metadata = tmp_path / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", "import anabranch"]
    given = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=given).stderr


def test_an_older_package_is_refused(tmp_path: Path) -> None:
    stderr = import_beside(tmp_path, "triton", "3.5.1")
    assert "ImportError: anabranch needs triton 3.6 or newer, and 3.5.1 is installed" in stderr


def test_a_newer_package_is_warned_of(tmp_path: Path) -> None:
    stderr = import_beside(tmp_path, "torch", "2.16.0+cu132")
    assert "UserWarning: anabranch is tested with torch 2.11 to 2.15; 2.16.0+cu132 is" in stderr


def test_versions_inside_are_not_mentioned(tmp_path: Path) -> None:
    assert not import_beside(tmp_path, "transformers", "5.23.0")
