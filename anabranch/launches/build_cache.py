"""Build something once: the result stays on disk under the hash of all that went into it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT_VARIABLE = "ANABRANCH_CACHE_DIR"
DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory() -> Path:
    """$ANABRANCH_CACHE_DIR, or `anabranch` in the user's cache directory."""
    if explicit := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anabranch"


def build_once(name: str, identity: tuple[str, ...], build: Callable[[], bytes]) -> Path:
    """The file that `build` makes, from the cache where `identity` was built before.

    Its last 32 bytes are the digest of the rest, so a damaged file is known and built again; ELF
    readers ignore them. Processes that build at the same time overwrite each other with the same
    content, each in one atomic rename.
    """
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:32]
    path = cache_directory() / f"{key}-{name}"
    if _is_intact(path):
        return path
    content = build()
    try:
        return _write(path, content)
    except OSError:  # no place for a cache: a file for this process
        return _write(Path(tempfile.mkdtemp(prefix="anabranch-")) / path.name, content)


def read(path: Path) -> bytes:
    """The content of a cached file."""
    return path.read_bytes()[:-DIGEST_BYTES]


def _is_intact(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
