"""The folder of peers that the environment names."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from attention_bench.implementations import UnavailableError

ENVIRONMENT_VARIABLE = "ANABRANCH_PEERS"


def add_folder() -> None:
    """Let the packages in the folder be found, after those that are installed."""
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if folder and folder not in sys.path:
        sys.path.append(folder)


def import_peer(name: str) -> ModuleType:
    """A peer's package, installed or from the folder."""
    try:
        return import_module(name)
    except ImportError as reason:
        raise UnavailableError(str(reason)) from reason


def has_folder() -> bool:
    """Whether the environment names a folder."""
    return bool(os.environ.get(ENVIRONMENT_VARIABLE))


def find_library(name: str) -> Path:
    """A peer's shared library in the folder."""
    path = Path(os.environ.get(ENVIRONMENT_VARIABLE, "")) / name
    if not path.is_file():
        raise UnavailableError(f"no {name} in a folder that {ENVIRONMENT_VARIABLE} names")
    return path
