"""What a sequence runs in one step."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.sequences.sequence import Sequence


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
