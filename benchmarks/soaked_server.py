"""A server of a tiny model in a process of its own, with ways to harm its engine."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
from tokenizer_families import model_of

ROOT = Path(__file__).parent.parent
OPEN_SECONDS = 5.0  # that the server waits for headers and bodies
SILENCE_SECONDS = 10.0  # after which an engine that stands still counts as dead
SERVE = """
import sys
from anabranch.llm.engine.config import EngineConfig, SpeculativeConfig
from anabranch.llm.server import command
from anabranch.llm.server.engine_watch import HangPolicy
from anabranch.llm.server.server_limits import ServerLimits
model, port, seconds, silence, ranks = sys.argv[1:]
config = EngineConfig(
    model=model, device="cpu", max_num_seqs=64, kv_cache_gib=0.05, tensor_parallel=int(ranks),
    speculative=SpeculativeConfig(),
)
limits = ServerLimits(header_seconds=float(seconds), body_seconds=float(seconds))
command.HangPolicy = lambda **given: HangPolicy(silence_seconds=float(silence), **given)
command.serve(config, port=int(port), model_name="tiny", limits=limits, log_level="error")
"""


class SoakedServer:
    """Its process, and the process of its engine."""

    def __init__(self, family: str, *, ranks: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = free.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        given = [self.address[1], OPEN_SECONDS, SILENCE_SECONDS, ranks]
        command = [sys.executable, "-c", SERVE, model_of(family), *map(str, given)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        self._watched = psutil.Process(self._process.pid)

    async def is_healthy(self, client: httpx.AsyncClient) -> bool:
        """Whether it answers requests; an end of the whole server ends the soak."""
        if self._process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {self._process.returncode}")
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def until_healthy(self, client: httpx.AsyncClient, healthy: bool = True) -> None:
        """Wait for the start or a restart, or for the server to notice that it needs one."""
        while await self.is_healthy(client) != healthy:
            await asyncio.sleep(0.05)

    def kill_engine(self) -> None:
        """As an operator without mercy would."""
        self._engine().kill()

    def stop_engine(self) -> None:
        """It stands still and holds all that it has."""
        self._engine().suspend()

    def kill_rank(self) -> None:
        """One that is not the engine's own process, nor the one that forks ranks."""
        direct = {child.pid for child in self._engine().children()}
        below = self._engine().children(recursive=True)
        next(process for process in below if process.pid not in direct).kill()

    def held(self) -> dict[str, Any]:
        """What the server holds now, and the memory of its engine."""
        return {
            "threads": self._watched.num_threads(),
            "files": self._watched.num_fds(),
            "MiB": round(self._watched.memory_info().rss / (1 << 20)),
            "engine MiB": round(self._engine().memory_info().rss / (1 << 20)),
        }

    def kill(self) -> None:
        """At once; its engine ends with it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> int:
        """The exit code after SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(90)

    def _engine(self) -> psutil.Process:
        (engine,) = self._watched.children()
        return engine
