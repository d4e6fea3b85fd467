"""What the engine asks of a proposer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from anabranch.llm.runner.stage_clock import StageClock
    from anabranch.llm.sequences.sequence import Scheduled, Sequence


class Proposer(Protocol):
    """Drafts tokens for sequences that are decoding."""

    on_device: bool  # drafts are made on the device, after scheduling

    def prepare(self, seqs: Seq[Sequence], num_drafts: int) -> None:
        """Before scheduling: set `num_drafts`, and `drafts` if the host knows them.

        Drafts that form a tree need `draft_parents` as well.
        """
        ...

    def propose(self, step: Seq[Scheduled], clock: StageClock) -> None:
        """After scheduling: put drafts that the host does not know into the device's table."""
        ...

    def finish(self, run: Scheduled, accepted: Seq[int]) -> None:
        """After verification of one sequence; which of its drafts were accepted, in order."""
        ...

    def forget(self, seq: Sequence) -> None:
        """A sequence is over."""
        ...
