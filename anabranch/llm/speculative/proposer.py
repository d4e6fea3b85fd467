"""What the engine asks of a proposer, and which drafts a tree of them should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Scheduled, Sequence

Node = TypeVar("Node")
STRENGTH = 8  # verifications that a chance assumed beforehand counts as
RECENT = 512  # outcomes after which older ones count half


class Proposer(Protocol):
    """Drafts tokens for sequences that are decoding."""

    on_device: bool  # drafts are made on the device, after scheduling

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Before scheduling: set `num_drafts`, and `drafts` if the host knows them.

        Drafts that form a tree need `draft_parents` as well.
        """

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """After scheduling: put drafts that the host does not know into the device's table."""

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """After verification of one sequence; which of its drafts were accepted, in order."""

    def forget(self, seq: Sequence) -> None:
        """A sequence is over."""


class AcceptanceRates:
    """Chances that a draft is right when its parent is, by rank among siblings and by kind."""

    def __init__(self, priors: Seq[Seq[float]]) -> None:
        """`priors` are assumed before the first outcome, for each rank and kind."""
        self._hits = [[STRENGTH * chance for chance in row] for row in priors]
        self._counts = [[float(STRENGTH)] * len(row) for row in priors]

    def chance(self, rank: int, kind: int) -> float:
        return self._hits[rank][kind] / self._counts[rank][kind]

    def add(self, rank: int, kind: int, accepted: bool) -> None:
        """One outcome of a draft whose parent was accepted."""
        self._hits[rank][kind] += accepted
        self._counts[rank][kind] += 1
        if self._counts[rank][kind] > RECENT:
            self._hits[rank][kind] /= 2
            self._counts[rank][kind] /= 2


def grow_tree(
    root: Node, expand: Callable[[Node], Iterable[tuple[float, Node]]], num_nodes: int
) -> tuple[list[Node], list[int]]:
    """The nodes most likely to be reached from a root, parents first, and those parents; -1: root.

    `expand` gives the children of a node, each with its chance when the node is reached.
    """
    nodes, parents = list[Node](), list[int]()
    waiting: list[tuple[float, int, int, Node]] = []  # by chance, then by age
    num_seen = 0
    chance, node = -1.0, root
    while True:
        for share, child in expand(node):
            heappush(waiting, (chance * share, num_seen, len(nodes) - 1, child))
            num_seen += 1
        if not waiting or len(nodes) >= num_nodes:
            return nodes, parents
        chance, _, parent, node = heappop(waiting)
        nodes.append(node)
        parents.append(parent)


def outcomes(parents: Seq[int], accepted: Seq[int]) -> Iterable[tuple[int, bool]]:
    """The drafts whose parent was reached, and whether each was accepted itself."""
    reached, right = {-1, *accepted}, set(accepted)
    return [(draft, draft in right) for draft, parent in enumerate(parents) if parent in reached]
