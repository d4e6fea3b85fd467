"""What every rank needs to run a step: its layout and the graph that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.llm.runner.graphs import GraphKey, PromptKey
from anabranch.llm.runner.step_layout import WHOLE, DecodeWay, StepLayout


@dataclass(frozen=True, slots=True)
class StepWork:
    """A prepared step. Small arrays only, so it can be sent to another process."""

    layout: StepLayout
    key: GraphKey | PromptKey | None  # None: no graph fits, the model is called
    way: DecodeWay = WHOLE

    @property
    def reads_unseen(self) -> bool:
        """Whether some token is known on rank 0's device only."""
        return bool((self.layout.sources >= 0).any())
