"""Which keys a query sees, and how logits come from scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from anabranch.shapes import FLOATS, Sizes, check_device, check_dtype

MAX_WINDOW = 1 << 30  # positions minus a window stay in int32


class Rules(NamedTuple):
    """The rules of one call. A kernel receives the same tuple, with its own spelling of some."""

    causal: bool
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0
    sinks: torch.Tensor | None = None  # [num_heads]
    tree_mask: torch.Tensor | None = None  # bool [num_tokens, width]

    @property
    def in_order(self) -> bool:
        """Whether keys after a token are hidden from it; a tree has its own order."""
        return self.causal and self.tree_mask is None


def make_rules(
    *,
    causal: bool,
    window: int | None,
    tree_mask: torch.Tensor | None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    head_dim: int,
) -> Rules:
    """Rules that do not contradict each other, with the default scale of a head dim."""
    if window is not None:
        if window < 1:
            raise ValueError(f"window must be at least 1, a token's own key, got {window}")
        window = min(window, MAX_WINDOW)
    if tree_mask is not None and window is not None:
        raise ValueError(f"tree_mask has no order for a window to count in, got window={window}")
    if tree_mask is not None and not causal:
        raise ValueError("tree_mask replaces the causal rule among new tokens, got causal=False")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    usual: float = max(head_dim, 1) ** -0.5
    return Rules(causal, window, softcap, usual if scale is None else scale, sinks, tree_mask)


def check_list_rules(rules: Rules) -> None:
    """Refuse rules about the order of keys, which lists do not have."""
    if rules.window is not None:
        raise ValueError(f"lists of keys have no order for a window, got window={rules.window}")
    if rules.tree_mask is not None:
        raise ValueError("lists say which keys a token sees, got a tree_mask beside them")


def check_rules(rules: Rules, sizes: Sizes, device: torch.device) -> None:
    """Refuse sinks and masks that do not go with the queries."""
    if rules.sinks is not None:
        sizes.match("sinks", rules.sinks, "num_heads")
        check_dtype("sinks", rules.sinks, FLOATS)
        check_device("sinks", rules.sinks, device)
    if rules.tree_mask is not None:
        sizes.match("tree_mask", rules.tree_mask, "num_tokens tree_width")
        check_dtype("tree_mask", rules.tree_mask, (torch.bool,))
        check_device("tree_mask", rules.tree_mask, device)
