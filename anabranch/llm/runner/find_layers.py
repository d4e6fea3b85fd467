"""The attention layers of a model, found by running it; models that pages cannot serve are refused.

What a model does is tried, whatever its class: a step of the engine gives positions and asks for
the logits of some tokens, and its keys are those of one causal call a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from anabranch.llm.runner.model_attention import Layers, collecting

KINDS = ("full_attention", "sliding_attention")  # of layers that keep keys and values only
TOLERANCE = 0.02  # of the largest logit: what sums in another order differ by in 16 bits


def find_layers(model: nn.Module, num_tokens: int, vocab_size: int) -> Layers:
    """Run the model over some tokens; its attention layers, in order, and what they keep."""
    _check_kept(model)
    device = next(model.parameters()).device
    ids = torch.arange(num_tokens, device=device)[None] % vocab_size
    positions = torch.arange(num_tokens, device=device)[None]
    layers, logits = _run(model, ids, positions)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not call attention through transformers' "
            "AttentionInterface, so its keys cannot be kept in pages"
        )
    if logits.shape[1] != 1:
        raise ValueError(
            f"{type(model).__name__} gives logits of {logits.shape[1]} tokens, asked for one"
        )
    if num_tokens > 1:
        _check_positions(model, ids, positions, logits)
    return layers


def _run(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor | None
) -> tuple[Layers, torch.Tensor]:
    """The layers, and the logits of the last token."""
    with collecting() as layers:
        try:
            found: Any = model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{type(model).__name__} needs more than tokens and their positions: "
                f"{type(error).__name__}: {error}"
            ) from error
    return layers, found.logits


def _check_positions(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
) -> None:
    """Refuse models that number tokens themselves: a step holds tokens of many places."""
    _, unmoved = _run(model, ids, torch.zeros_like(positions))
    if torch.equal(unmoved, logits):
        raise ValueError(
            f"{type(model).__name__} does not use position_ids: the tokens of a step have places "
            "that it cannot know"
        )
    _, own = _run(model, ids, None)
    if (own - logits).abs().max() > TOLERANCE * own.abs().max():
        raise ValueError(f"{type(model).__name__} numbers the tokens of a text not from 0 on")


def _check_kept(model: nn.Module) -> None:
    """Refuse models with layers that keep something else than keys and values."""
    config = cast("Any", model).config.get_text_config()
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    other = next((kind for kind in kinds if kind not in KINDS), None)
    if other is not None or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} has layers of kind {other or 'recurrent'!r}; "
            f"pages hold keys and values, those of {' and '.join(KINDS)}"
        )
