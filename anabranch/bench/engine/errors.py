"""Errors that are the user's to mend: a line each, no traceback."""

from __future__ import annotations

import torch

EXPECTED = (ValueError, OSError, ImportError, MemoryError, torch.OutOfMemoryError)


def one_line(error: BaseException) -> str:
    """What went wrong, without line breaks."""
    said = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"{said}; pip install 'anabranch[engine]'"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return said or type(error).__name__
