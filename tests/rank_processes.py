"""Processes of one gloo group, forked from a server that has imported torch."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
JOIN_SECONDS = 300  # only a hang takes so long
Check = Callable[[], None]


def join_group(rank: int, num_ranks: int, store: str, timeout_s: int = 120) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # NaN in fresh memory
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _run_checks(
    rank: int, num_ranks: int, store: str, checks: Sequence[Check], results: Any
) -> None:
    """Every rank runs every check up to the first failure, after which ranks are out of step."""
    join_group(rank, num_ranks, store)
    for check in checks:
        try:
            check()
            dist.barrier()
        except BaseException:
            results.put((rank, check.__name__, traceback.format_exc()[-4000:]))
            os._exit(1)
        results.put((rank, check.__name__, None))
    dist.destroy_process_group()


def start(num_ranks: int, target: Callable[..., None], *arguments: object) -> list[Any]:
    CONTEXT.set_forkserver_preload(["torch.distributed", "anabranch.engine.llm"])
    folder = tempfile.mkdtemp()
    store = os.path.join(folder, "store")
    processes = [
        CONTEXT.Process(target=target, args=(rank, num_ranks, store, *arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def end(processes: Sequence[Any]) -> None:
    for process in processes:
        process.join(JOIN_SECONDS)
        hung = process.is_alive()
        process.kill()
        process.join()
        assert not hung, "a rank hangs"


def run_checks(num_ranks: int, checks: Sequence[Check]) -> dict[str, list[str | None]]:
    """What each check said on each rank: None or the traceback; nothing for those not reached."""
    queue = CONTEXT.SimpleQueue()
    end_of = start(num_ranks, _run_checks, checks, queue)
    results: dict[str, list[str | None]] = {check.__name__: [] for check in checks}
    end(end_of)
    while not queue.empty():
        _, name, error = queue.get()
        results[name].append(error)
    return results
