"""What drafts tokens, made by the method asked for; models that cannot draft so are refused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anabranch.llm.engine.config import SpeculativeConfig
from anabranch.llm.engine.limits import Limits, text_config
from anabranch.llm.models import LoadedModel
from anabranch.llm.runner.model_runner import ModelRunner
from anabranch.llm.sampling.params import SamplingRows
from anabranch.llm.speculative.draft_chain import DraftChain, TreeChain
from anabranch.llm.speculative.draft_draws import DraftDraws
from anabranch.llm.speculative.draft_inputs import DraftInputs
from anabranch.llm.speculative.draft_model import DraftProposer, DraftTreeProposer
from anabranch.llm.speculative.ngram import NgramProposer, NgramTreeProposer
from anabranch.llm.speculative.proposer import Proposer


def check_windows(models: Sequence[LoadedModel]) -> None:
    """Refuse models for trees whose layers count keys in order."""
    for loaded in models:
        config = text_config(loaded)
        kinds: list[str] = getattr(config, "layer_types", None) or []
        window: int | None = getattr(config, "sliding_window", None)
        everywhere = (
            not kinds and window is not None and getattr(config, "use_sliding_window", True)
        )
        if everywhere or "sliding_attention" in kinds:
            raise ValueError(
                f"tree_width above 1 needs full attention in every layer: {loaded.name} has "
                f"windows of {window} keys, for which a tree has no order"
            )


def make_chain(
    runner: ModelRunner, limits: Limits, unseen: torch.Tensor, rows: SamplingRows, tree_width: int
) -> DraftChain:
    """A draft model's passes, of chains or of trees."""
    inputs = DraftInputs(
        max_num_seqs=limits.max_num_seqs,
        max_num_pages=limits.table_width,
        max_drafts=limits.max_drafts,
        page_size=limits.page_size,
        device=unseen.device,
    )
    draws = DraftDraws(rows, limits.max_drafts, unseen.device)
    if tree_width > 1:
        return TreeChain(runner, inputs, draws, unseen, tree_width)
    return DraftChain(runner, inputs, draws, unseen)


def make_proposer(
    speculative: SpeculativeConfig | None, chain: DraftChain | None, limits: Limits
) -> Proposer | None:
    """What drafts tokens, by the method asked for."""
    if speculative is None:
        return None
    if chain is None:
        sizes = speculative.min_ngram, speculative.max_ngram
        if speculative.has_trees:
            return NgramTreeProposer(*sizes, speculative.tree_width)
        return NgramProposer(*sizes)
    budget = limits.max_num_tokens + limits.max_num_seqs
    if isinstance(chain, TreeChain):
        return DraftTreeProposer(chain, budget, speculative.tree_width)
    return DraftProposer(chain, budget)
