"""An engine on several ranks: rank 0 schedules and samples, the others run what it sends them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from anabranch.distributed.collectives import broadcast
from anabranch.distributed.rank_group import RankGroup
from anabranch.llm.engine.build import Built, build
from anabranch.llm.engine.config import EngineConfig
from anabranch.llm.models.load import local_source
from anabranch.llm.parallel.followers import Followers, end_process
from anabranch.llm.runner.graphs import Progress, StepWork
from anabranch.llm.runner.model_runner import ModelRunner

NOTICE_SECONDS = 2.0  # for the end of a process to be noticed after a collective has failed
TIMEOUT_SECONDS = 600.0  # of a collective; ranks may load at different speeds
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
log = logging.getLogger("anabranch")


class RankLostError(RuntimeError):
    """A process of the group has ended; the engine cannot go on."""


class SingleRank:
    """The only process of an engine, which waits for no other."""

    @property
    def pids(self) -> list[int]:
        """Of the other processes, in the order of ranks."""
        return []

    def check(self) -> None:
        """Raise RankLostError if a rank has ended."""

    @contextmanager
    def guard(self) -> Generator[None]:
        """Run what all ranks take part in; its failure is that of the rank that has ended."""
        yield

    def close(self) -> None:
        """End the other ranks."""


class LeadingRank(SingleRank):
    """Rank 0 of several: starts the others, sends them its steps, and notices their end."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        device = config.resolve_device()
        _check_device(config, device)
        if dist.is_initialized():
            raise ValueError(
                "this process belongs to a process group already: close the other engine first"
            )
        source = local_source(config.model, progress=_titles(progress))
        self._on_gpu = device.type == "cuda"
        self._lost: str | None = None
        self._ended = threading.Event()
        self._num_threads = torch.get_num_threads()
        _take_device(config, 0)
        if progress:
            progress(f"starting {config.num_ranks} ranks", 0, 0)
        self._followers = Followers(
            config.num_ranks,
            follow_rank_0,
            replace(config, model=source),
            backend=BACKENDS[device.type],
            timeout_s=TIMEOUT_SECONDS,
            on_death=self._lose,
        )
        self._runner: ModelRunner | None = None

    @property
    def pids(self) -> list[int]:
        """Of the other processes, in the order of ranks."""
        return self._followers.pids

    def build(self, config: EngineConfig, progress: Progress | None) -> Built:
        """This rank's part of the engine, whose steps all ranks run from now on."""
        try:
            with self.guard():
                built = build(config, progress, self._followers.ranks)
        except BaseException:
            self.close()
            raise
        self._runner, group = built.runner, self._followers.ranks.group

        def share(work: StepWork) -> None:
            self._followers.send(work)
            if work.reads_unseen:
                broadcast(built.unseen, group)

        built.runner.share = share
        return built

    def check(self) -> None:
        """Raise RankLostError if a rank has ended."""
        if self._lost is not None:
            raise RankLostError(self._lost)

    @contextmanager
    def guard(self) -> Generator[None]:
        """Run what all ranks take part in; its failure is that of the rank that has ended."""
        self.check()
        try:
            yield
        except (RuntimeError, OSError) as error:
            if self._ended.wait(NOTICE_SECONDS):
                raise RankLostError(self._lost) from error
            raise

    def close(self) -> None:
        """End the other ranks, and let this process use all its cores again."""
        if self._runner is not None:
            self._runner.graphs.clear()
            self._runner.prompt_graphs.clear()
        self._followers.close()
        torch.set_num_threads(self._num_threads)

    def _lose(self, rank: int, exit_code: int | None) -> None:
        """From a thread. A collective of gloo fails by itself; nothing ends one of NCCL."""
        self._lost = f"rank {rank} of the engine ended with exit code {exit_code}"
        log.error("%s", self._lost)
        self._ended.set()
        if self._on_gpu:
            end_process(rank, exit_code)


def build_engine(
    config: EngineConfig, progress: Progress | None = None
) -> tuple[Built, SingleRank]:
    """An engine's parts, and the other ranks that run with it."""
    if not uses_ranks(config):
        return build(config, progress), SingleRank()
    lead = LeadingRank(config, progress)
    return lead.build(config, progress), lead


def uses_ranks(config: EngineConfig) -> bool:
    """Whether there is anything to share: a single process needs no group."""
    return config.num_ranks > 1


def follow_rank_0(ranks: RankGroup, commands: Iterator[Any], config: EngineConfig) -> None:
    """Run the steps that rank 0 sends, until it ends or closes the engine."""
    device = _take_device(config, ranks.rank)
    built = build(replace(config, device=device), ranks=ranks)

    def share(work: StepWork) -> None:
        if work.reads_unseen:
            broadcast(built.unseen, ranks.group)

    built.runner.share = share
    for work in commands:
        built.runner.execute(work)
    built.runner.graphs.clear()
    built.runner.prompt_graphs.clear()


def _titles(progress: Progress | None) -> Callable[[str], None] | None:
    return (lambda what: progress(what, 0, 0)) if progress else None


def _check_device(config: EngineConfig, device: torch.device) -> None:
    if device.type != "cuda":
        return
    if config.num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel {config.tensor_parallel} x context_parallel "
            f"{config.context_parallel} needs {config.num_ranks} GPUs, "
            f"torch sees {torch.cuda.device_count()}"
        )
    if config.device not in (None, "cuda", "cuda:0"):
        raise ValueError(f"several ranks take GPUs from 0 on, got device {config.device!r}")


def _take_device(config: EngineConfig, rank: int) -> str:
    """A GPU of its own for each rank; on a CPU, its share of the cores."""
    if config.resolve_device().type == "cuda":
        torch.cuda.set_device(rank)
        return f"cuda:{rank}"
    cores = len(os.sched_getaffinity(0))
    share = max(cores // config.num_ranks, 1)
    torch.set_num_threads(min(share, torch.get_num_threads()))
    return "cpu"
