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
# Engines run on 2 ranks in `test_ranks`
NUM_RANKS = [int(count) for count in os.environ.get("ANABRANCH_TEST_RANKS", "4").split(",")]


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
    CONTEXT.set_forkserver_preload(["torch.distributed", "anabranch.llm.engine.llm"])
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


def assert_all_pass(num_ranks: int, checks: Sequence[Check]) -> None:
    """Run checks one after the other, each on all ranks at once."""
    queue = CONTEXT.SimpleQueue()
    processes = start(num_ranks, _run_checks, checks, queue)
    end(processes)
    passed, errors = set(), list[str]()
    while not queue.empty():
        rank, name, error = queue.get()
        passed.add((rank, name))
        errors += [f"{name} on rank {rank}:\n{error}"] if error else []
    assert not errors, "\n".join(errors)
    assert len(passed) == num_ranks * len(checks), "a rank ended before its checks"
