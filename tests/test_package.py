"""The package's names are imported when they are asked for, and are what they seem."""

from __future__ import annotations

import subprocess
import sys

import pytest

import anabranch

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
