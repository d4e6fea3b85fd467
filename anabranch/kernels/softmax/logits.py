"""Logits of a tile: products of queries and keys, capped, weighted and masked."""

import triton
import triton.language as tl

from anabranch.kernels.softmax.masks import visible
from anabranch.kernels.softmax.online_softmax import LN_2


@triton.jit
def capped(scores, scale, softcap):
    """Natural logits softcap * tanh(scores * scale / softcap); tanh(x) = 1 - 2 / (e^2x + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / softcap)) + 1.0))


@triton.jit
def capped_exactly(scores, scale, softcap):
    """The same in float32: 1 - 2 / (e^2x + 1) would have no digits left where x is small.

    tanh(x) = g / (g + 2) with g = e^2x - 1, for small x by its series.
    """
    twice = scores * (2.0 * scale * LN_2 / softcap)
    size = tl.minimum(tl.abs(twice), 64.0, propagate_nan=tl.PropagateNan.ALL)
    series = 1.0 + size * (1.0 / 11.0)
    for i in tl.static_range(9):
        series = 1.0 + series * size * (1.0 / (10 - i))
    grown = tl.where(size < 1.0, series * size, tl.exp2(size * (1.0 / LN_2)) - 1.0)
    tanh = grown / (grown + 2.0)
    return softcap * tl.where(twice < 0, -tanh, tanh)


@triton.jit
def weighted(scores, scale, weight_ptrs, KEYS_FIRST: tl.constexpr):
    """Natural logits: scores times a scale in base 2, plus the log-weight of each key."""
    weights = tl.load(weight_ptrs)
    weights = weights[:, None] if KEYS_FIRST else weights[None, :]
    return scores * (scale * LN_2) + weights


@triton.jit
def score(q, k, scores, KEYS_FIRST: tl.constexpr):
    """scores + q k^T [ROWS, KEYS], or its transpose with KEYS_FIRST."""
    if KEYS_FIRST:
        return tl.dot(k, tl.trans(q), scores, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), scores, input_precision="ieee")


@triton.jit
def masked(scores, keys, queries, block, rules, tree_width, C: tl.constexpr):
    """Scores, -inf where a token does not see a key."""
    tokens, tree_rows = queries.tokens, queries.tree_rows
    if C.tiles.keys_first:
        key_side, token_side = keys[:, None], tokens[None, :]
        if tree_rows is not None:
            tree_rows = tree_rows[None, :]
    else:
        key_side, token_side = keys[None, :], tokens[:, None]
        if tree_rows is not None:
            tree_rows = tree_rows[:, None]
    ONE_BOUND: tl.constexpr = not C.source.is_plain
    seen = visible(
        token_side, key_side, block, rules.window, tree_rows, tree_width, C.causal, ONE_BOUND
    )
    return tl.where(seen, scores, float("-inf"))
