"""The best experts of each token by their scores, within the best groups of experts.

Experts have places: each group of experts begins at a multiple of a power of two.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # the score of experts that are chosen only after all others


@triton.jit
def limit_groups(
    choice,  # [ROWS, PLACES]
    TOP_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,  # a group is as good as its two best experts, not its best one
):
    """The scores, lowest outside of the best groups."""
    ROWS: tl.constexpr = choice.shape[0]
    SPAN: tl.constexpr = choice.shape[1] // GROUPS
    grouped = tl.reshape(choice, [ROWS, GROUPS, SPAN])
    scores, best = tl.max(grouped, 2, return_indices=True)
    if TWO_BEST:
        is_best = tl.arange(0, SPAN)[None, None, :] == best[:, :, None]
        scores += tl.max(tl.where(is_best, float("-inf"), grouped), 2)
    groups = tl.arange(0, GROUPS)
    other, own = scores[:, None, :], scores[:, :, None]
    is_before = groups[None, None, :] < groups[None, :, None]
    better = (other > own) | ((other == own) & is_before)
    num_better = tl.sum(tl.where(better, 1.0, 0.0), 2)  # bits would be counted in memory
    grouped = tl.where(num_better[:, :, None] < TOP_GROUPS, grouped, LOWEST)
    return tl.reshape(grouped, [ROWS, GROUPS * SPAN])


@triton.jit
def choose_experts(
    logits,  # [ROWS, PLACES]
    bias,  # [PLACES]
    is_expert,  # [PLACES]
    scale,
    C: tl.constexpr,  # RouteConstants
):
    """The places of the chosen experts and their weights [ROWS, SLOTS]; equal ones by place.

    Softmax keeps the order of logits, so the choice is among those. NaN is chosen last.
    """
    SLOTS: tl.constexpr = C.slots
    TOP_K: tl.constexpr = C.top_k
    places, slots = tl.arange(0, logits.shape[1]), tl.arange(0, SLOTS)
    if C.sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores + bias[None, :]
    else:
        choice = tl.where(is_expert[None, :], logits, float("-inf"))
        peak = tl.max(choice, 1)
        total = tl.sum(tl.exp(choice - peak[:, None]), 1)
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    if C.num_groups > 1:
        choice = tl.where(is_expert[None, :], choice, float("-inf"))
        choice = limit_groups(choice, C.top_groups, C.groups, C.sigmoid)
    choice = tl.where(is_expert[None, :], choice, float("-inf"))

    chosen = tl.zeros([logits.shape[0], SLOTS], tl.int32)
    weights = tl.full([logits.shape[0], SLOTS], float("-inf"), tl.float32)
    for slot in tl.static_range(TOP_K):
        best, place = tl.max(choice, 1, return_indices=True)
        is_chosen = places[None, :] == place[:, None]
        if C.sigmoid:
            best = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
        choice = tl.where(is_chosen, float("-inf"), choice)
        chosen = tl.where(slots[None, :] == slot, place[:, None], chosen)
        weights = tl.where(slots[None, :] == slot, best[:, None], weights)
    if C.sigmoid:
        weights = tl.where(slots[None, :] < TOP_K, weights, 0.0)
    else:
        weights = tl.exp(weights - peak[:, None]) / total[:, None]
    if C.normalised:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    return chosen, weights * scale
