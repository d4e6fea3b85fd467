"""What a sequence runs in one step."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.compositions.tree import check_tree_order, node_depths
from anabranch.llm.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A run of tokens of one sequence: known and pending ones, then drafts, then padding."""

    seq: Sequence
    start: int  # position of the first
    num_tokens: int
    num_drafts: int = 0
    num_padding: int = 0  # positions computed for the sake of an equal number for all
    samples: bool = True  # the sequence is computed to its end and gets a token
    by_draft_model: bool = False
    parents: tuple[int, ...] | None = None  # of the drafts, as in `Sequence`; None for a chain

    def __post_init__(self) -> None:
        if self.parents is None:
            return
        name = f"sequence {self.seq.index} of request {self.seq.request_id}"
        if len(self.parents) != self.num_drafts:
            raise ValueError(f"{name} has {self.num_drafts} drafts, {len(self.parents)} parents")
        check_tree_order(name, self.parents)

    @property
    def depths(self) -> list[int]:
        """How far each draft stands after the last known token."""
        if self.parents is None:
            return list(range(1, self.num_drafts + 1))
        return node_depths(self.parents)

    @property
    def draft_parents(self) -> tuple[int, ...]:
        """Of each draft, those of a chain too: an earlier draft, or -1."""
        return tuple(range(-1, self.num_drafts - 1)) if self.parents is None else self.parents

    def has_drafts_after(self, accepted: list[int]) -> bool:
        """Whether drafts followed the accepted ones, the last of which is given."""
        last = accepted[-1] if accepted else -1
        if self.parents is None:
            return last + 1 < self.num_drafts
        return last in self.parents

    @property
    def num_known(self) -> int:
        """Tokens of the sequence proper."""
        return self.num_tokens - self.num_drafts - self.num_padding

    @property
    def scores_prompt(self) -> bool:
        """Whether logits of the prompt's own tokens are wanted."""
        wanted = self.seq.scores_prompt and not self.by_draft_model
        return wanted and self.start < self.seq.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether it goes on from the last output token."""
        return self.num_known == 1 and self.start >= self.seq.prompt_len
