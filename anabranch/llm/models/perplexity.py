"""How surprised a model is by a text: one figure for what quantised weights changed."""

from __future__ import annotations

import math
from typing import Any

import torch

WINDOW = 512  # tokens that are read at once, the second half of them scored
MOST_WINDOWS = 4


@torch.inference_mode()
def perplexity(model: Any, tokenizer: Any, text: str) -> tuple[float, int]:
    """Of the beginning of a text, and of how many tokens."""
    ids: list[int] = tokenizer(text).input_ids
    window = min(WINDOW, len(ids), model.config.max_position_embeddings)
    if window < 2:
        raise ValueError(f"the text has {len(ids)} tokens, and 2 are needed")
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for start in range(0, len(ids) - window + 1, window)[:MOST_WINDOWS]:
        some = torch.tensor(ids[start : start + window], device=device)
        first = window // 2
        logits = model(some[None], use_cache=False).logits[0, first - 1 : -1].float()
        scored = logits.log_softmax(-1).gather(1, some[first:, None])
        total -= float(scored.sum())
        count += len(scored)
    return math.exp(total / count), count
