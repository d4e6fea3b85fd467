"""How many files and sockets the server's process may hold open."""

from __future__ import annotations

import logging
import sys

BESIDE_CONNECTIONS = 256  # files of the page, of the engine, of libraries
log = logging.getLogger(__name__)


def make_room_for(num_connections: int) -> None:
    """Raise the process's limit, as far as the system lets it, and warn if that is not enough."""
    if sys.platform == "win32":
        return
    import resource

    wanted = num_connections + BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d connections may need %d open files, and the system allows %d",
            num_connections,
            wanted,
            allowed,
        )
