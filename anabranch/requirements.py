"""The versions of other packages that this one works with, looked at when it is imported."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

Numbers = tuple[int, ...]

# The oldest and the newest, as far as their numbers are given; pyproject.toml has the same.
RANGES: dict[str, tuple[Numbers, Numbers]] = {
    "torch": ((2, 11), (2, 15)),
    "triton": ((3, 6), (3, 9)),
    "transformers": ((5, 17), (5,)),
}


def check_versions() -> None:
    """Refuse an installed package that is too old, and warn of one newer than any tested.

    Its metadata is read; nothing is imported. A package that is not there is not needed yet.
    """
    for package, (oldest, newest) in RANGES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
        if numbers < oldest:
            raise ImportError(
                f"anabranch needs {package} {_spell(oldest)} or newer, and {found} is installed"
            )
        if numbers[: len(newest)] > newest:
            warnings.warn(
                f"anabranch is tested with {package} {_spell(oldest)} to {_spell(newest)}; "
                f"{found} is newer, and kernels may fail to compile or be slow",
                stacklevel=3,
            )


def _spell(numbers: Numbers) -> str:
    return ".".join(map(str, numbers))
