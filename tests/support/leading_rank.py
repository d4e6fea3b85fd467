"""A rank 0 that has two followers twice, closes the first and ends as its argument says."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import torch

from anabranch.distributed.collectives import all_reduce
from anabranch.distributed.rank_group import RankGroup
from anabranch.llm.parallel.followers import Followers


def follow(ranks: RankGroup, commands: Iterator[int], factor: int) -> None:
    torch.set_num_threads(1)
    for command in commands:
        all_reduce(torch.tensor([command * factor * ranks.rank]), ranks.group)


def sums() -> Followers:
    followers = Followers(3, follow, 10, backend="gloo")
    for command in (1, 2):
        followers.send(command)
        total = torch.tensor([0])
        all_reduce(total, followers.ranks.group)
        print(int(total), flush=True)
    return followers


def lead(what: str) -> None:
    torch.set_num_threads(1)
    sums().close()
    followers = sums()
    print(*followers.pids, flush=True)
    if what == "end":
        return
    if what == "lose a follower":
        os.kill(followers.pids[1], signal.SIGKILL)
    else:
        followers.send(3)  # they wait for this rank in a collective
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    lead(sys.argv[1])
