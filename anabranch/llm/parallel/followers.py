"""Processes that follow rank 0: it starts them, sends them commands and watches them.

Nothing waits for a rank that is gone. Rank 0 watches its followers and calls `on_death` at once
when one ends; a follower watches rank 0 and ends with it, even inside a collective.
"""

from __future__ import annotations

import atexit
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch.distributed as dist

from anabranch.distributed.rank_group import RankGroup, find_group

_dist = cast("Any", dist)
HOST = "127.0.0.1"
EXIT_CODE = 70  # of rank 0 when a follower is gone: the software failed
JOIN_SECONDS = 10
POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0  # in which a failure of all ranks is left to rank 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the processes of a group find each other."""

    port: int
    num_ranks: int
    backend: str  # gloo, or cpu:gloo,cuda:nccl
    timeout_s: float  # after which a collective that waits for a rank fails


# What a follower runs: its place in the group, the commands of rank 0, and arguments of its own.
Follow = Callable[..., None]


class Followers:
    """Ranks 1 to num_ranks - 1, from the view of rank 0."""

    def __init__(
        self,
        num_ranks: int,
        follow: Follow,
        *arguments: object,
        backend: str,
        timeout_s: float = 60.0,
        on_death: Callable[[int, int | None], None] | None = None,
    ) -> None:
        """Start a process for each rank but this one, and join their group.

        `follow(ranks, commands, *arguments)` runs there; it and its arguments must be picklable.
        `on_death(rank, exit_code)` is called from a thread; by default it ends this process.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        self._on_death = on_death or end_process
        self._closing = threading.Event()
        atexit.register(self._closing.set)  # then followers end in order
        store = _dist.TCPStore(HOST, 0, num_ranks, is_master=True, wait_for_workers=False)
        meeting = Meeting(store.port, num_ranks, backend, timeout_s)
        # forked from a process that never used a GPU, and that has imported torch for all
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", __name__, follow.__module__])
        self._channels: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(1, num_ranks):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_follower, args=(rank, meeting, theirs, follow, arguments), daemon=True
            )
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)
        self._await(store)
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        self.ranks = _join(0, meeting, store)

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks."""
        return [process.pid for process in self._processes]

    def send(self, command: object) -> None:
        """Give all followers a command; they carry out commands in order."""
        for channel in self._channels:
            channel.send(command)

    def close(self) -> None:
        """Let the followers end after the commands they have."""
        self._closing.set()
        for channel in self._channels:
            channel.close()
        until = time.monotonic() + JOIN_SECONDS
        for process in self._processes:
            process.join(max(until - time.monotonic(), 0))
            process.kill()
        dist.destroy_process_group()

    def _await(self, store: Any) -> None:
        """Wait until all have arrived; a group cannot be left while it is being joined."""
        names = [_arrival(rank) for rank, _ in enumerate(self._processes, 1)]
        while names and not store.check(names):
            for rank, process in enumerate(self._processes, 1):
                if process.exitcode is not None:
                    for each in self._processes:
                        each.kill()
                    raise RuntimeError(
                        f"rank {rank} ended with exit code {process.exitcode} before it joined"
                    )
            time.sleep(POLL_SECONDS)

    def _watch(self) -> None:
        by_sentinel = {each.sentinel: rank for rank, each in enumerate(self._processes, 1)}
        if not by_sentinel:
            return
        rank = by_sentinel[cast("Any", wait(by_sentinel)[0])]
        if not self._closing.is_set():
            process = self._processes[rank - 1]
            process.join(JOIN_SECONDS)  # the sentinel comes before the exit code
            self._on_death(rank, process.exitcode)


def end_process(rank: int, exit_code: int | None) -> None:
    """End this process: whoever watches it learns that the group is gone."""
    print(f"rank {rank} ended with exit code {exit_code}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def _run_follower(
    rank: int,
    meeting: Meeting,
    channel: Connection,
    follow: Follow,
    arguments: tuple[object, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, with which this one ends
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    store = _dist.TCPStore(HOST, meeting.port, meeting.num_ranks, is_master=False)
    store.set(_arrival(rank), "")
    ranks = _join(rank, meeting, store)
    try:
        follow(ranks, _commands(channel), *arguments)
    except Exception:
        trace = traceback.format_exc()
        if not _closes(channel, GRACE_SECONDS):
            print(f"rank {rank} failed:\n{trace}", file=sys.stderr, flush=True)
        os._exit(1)
    dist.destroy_process_group()


def _arrival(rank: int) -> str:
    """The store's key for the arrival of a rank."""
    return f"rank {rank}"


def _commands(channel: Connection) -> Iterator[object]:
    """What rank 0 sends, until it closes the channel."""
    while True:
        try:
            command: object = channel.recv()
        except EOFError:
            return
        yield command


def _closes(channel: Connection, seconds: float) -> bool:
    """Whether rank 0 ends the group soon: then it has failed, too, and reports why."""
    until = time.monotonic() + seconds
    try:
        while channel.poll(max(until - time.monotonic(), 0)):
            channel.recv()
    except EOFError:
        return True
    return False


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_CODE)


def _join(rank: int, meeting: Meeting, store: Any) -> RankGroup:
    _dist.init_process_group(
        meeting.backend,
        store=store,
        rank=rank,
        world_size=meeting.num_ranks,
        timeout=datetime.timedelta(seconds=meeting.timeout_s),
    )
    return find_group(None)
