"""How much a JSON body holds, known before it is parsed.

Parsing and checking a body keep the interpreter to themselves: a million small lists, which a few
MiB hold, take seconds, a text of the same size milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_VALUES = 1 << 19  # numbers and strings: tens of milliseconds
MAX_CONTAINERS = 1 << 15  # lists and objects
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def has_many_values(chunks: Sequence[bytes]) -> bool:
    """Whether a body, in the pieces in which it came, holds more than is parsed."""
    if not _exceeds(chunks):
        return False
    return _exceeds([_STRING.sub(b"", b"".join(chunks))])  # commas and brackets of texts are none


def _exceeds(chunks: Sequence[bytes]) -> bool:
    num_values = sum(chunk.count(b",") for chunk in chunks)
    num_containers = sum(chunk.count(b"[") + chunk.count(b"{") for chunk in chunks)
    return num_values >= MAX_VALUES or num_containers > MAX_CONTAINERS
