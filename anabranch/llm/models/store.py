"""Where converted models stay: directories of the user's cache that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from anabranch.launches.build_cache import cache_directory

CONVERSION = 2  # raised when a conversion would come out differently
Progress = Callable[[str], None]  # called with what starts now


def models_directory() -> Path:
    """The folder of the user's cache that holds converted models."""
    return cache_directory() / "models"


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache; `make` fills an empty one where there is none yet.

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
