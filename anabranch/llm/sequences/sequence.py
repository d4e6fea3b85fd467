"""A prompt and one continuation, and what it runs in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from anabranch.compositions.tree import check_tree_order, node_depths
from anabranch.llm.grammar.token_rules import TokenRules
from anabranch.llm.sampling.params import SamplingParams
from anabranch.llm.sampling.token_logprobs import TokenLogprobs
from anabranch.llm.sequences.page_pool import SequencePages


class Origin(IntEnum):
    """Where an output token came from."""

    SAMPLED = 0  # by a step without a draft at its position
    ACCEPTED = 1  # a draft that equals the model's own token
    CORRECTED = 2  # the model's own token where a draft was rejected


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation.

    `tokens` are known to the host. A token that a step in flight will sample is pending: its
    position is certain, its value is not.
    """

    request_id: str
    index: int  # among the n continuations of a request
    params: SamplingParams
    prompt_len: int
    tokens: list[int]
    pages: SequencePages
    seed: int
    max_tokens: int  # output tokens it may have, within the context
    stop_ids: frozenset[int] = frozenset()
    speculates: bool = False
    rules: TokenRules | None = None  # which tokens may follow
    row: int | None = None  # in the sampler's tables, while running
    num_computed: int = 0  # tokens whose keys are in the cache, or will be after the step in flight
    num_draft_computed: int = 0  # the same for the draft model's cache
    num_pending: int = 0
    num_cached: int = 0  # tokens that prefix reuse saved at the first admission
    num_preemptions: int = 0
    drafts: list[int] = field(default_factory=list[int])
    num_drafts: int = 0  # to verify in the next step
    # for drafts that form a tree: of each, an earlier draft, or -1 for the last token
    draft_parents: list[int] | None = None
    origins: list[Origin] = field(default_factory=list[Origin])
    steps: list[int] = field(default_factory=list[int])  # which step emitted a token
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        """How many tokens follow the prompt, without pending ones."""
        return len(self.tokens) - self.prompt_len

    @property
    def length(self) -> int:
        """All tokens, known and pending."""
        return len(self.tokens) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether its next step computes only the last token."""
        return self.num_uncomputed == 1 and self.length > self.prompt_len

    @property
    def scores_prompt(self) -> bool:
        """Whether it computes logprobs of the prompt: one of n sequences does so for all."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def exhausted(self) -> bool:
        """Whether the tokens known and pending are all it may have."""
        return len(self.tokens) + self.num_pending - self.prompt_len >= self.max_tokens

    @property
    def draft_room(self) -> int:
        """How deep its drafts may be: verification emits one token beyond them."""
        return self.max_tokens - self.num_output - 1

    def cut_drafts(self) -> None:
        """Keep the drafts before the first that stands beyond the room."""
        room = self.draft_room
        if self.draft_parents is None:
            self.num_drafts = min(self.num_drafts, room)
            return
        depths = node_depths(self.draft_parents[: self.num_drafts])
        cut = (place for place, depth in enumerate(depths) if depth > room)
        self.num_drafts = next(cut, len(depths))

    def cut_invalid_drafts(self) -> None:
        """Keep the drafts of a chain, where the host knows them, that its rules allow."""
        if self.rules is not None and self.drafts and self.draft_parents is None:
            self.num_drafts = self.rules.num_valid(self.drafts[: self.num_drafts])

    @property
    def finished(self) -> bool:
        """Whether it gets no more tokens."""
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
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
        if self.start >= self.seq.prompt_len:
            return False
        return self.seq.scores_prompt and not self.by_draft_model

    @property
    def decoding(self) -> bool:
        """Whether it goes on from the last output token."""
        return self.start >= self.seq.prompt_len and self.num_known == 1
