"""Names under which a server answers.

A page of another origin can have its own name resolve to 127.0.0.1 (DNS rebinding); a browser then
takes a server on this machine for that origin's. Such requests carry the page's name as their host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


class HostNames:
    """This machine's own names, every address, which nobody can rebind, and those given."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        for name in names:
            if not name or any(mark in name for mark in "/:@ ") or isinstance(names, str):
                raise ValueError(
                    f"allowed_hosts must hold names like chat.example, without a port, got {name!r}"
                )
        self._names = {name.lower() for name in names} | {"localhost"}

    def holds(self, header: str) -> bool:
        """Whether the value of a Host header is one of them, with any port."""
        name = _without_port(header.strip()).lower().removesuffix(".")
        is_local = name in self._names or name.endswith(".localhost")
        return is_local or _address(name.strip("[]")) is not None


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
