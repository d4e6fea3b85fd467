"""One tile of keys in a consumer: scores, weights, and the weighted values of the tile before."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anabranch.kernels.gluon.barriers import (
    K_FREE,
    PAIR_AND_PRODUCER,
    V_FREE,
    bar_arrive,
    carried_weights,
    carry_weights,
    exp2,
    hidden_zero,
)
from anabranch.kernels.softmax.logits import capped
from anabranch.kernels.softmax.masks import visible
from anabranch.kernels.softmax.online_softmax import LOG2_E, pivot_of


@gluon.jit
def issue_scores(q, q_main, k, slot, zero, C: gl.constexpr, WG: gl.constexpr):
    """Q K^T of one tile, under way."""
    BLOCK_N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    scores = gl.zeros([64, BLOCK_N], gl.float32, layout)
    keys = k[0].index(slot).permute((1, 0))
    if C.q_in_registers:
        scores = warpgroup_mma(q_main, keys, scores, use_acc=False, is_async=True)
    else:
        scores = warpgroup_mma(q[0].index(WG + zero), keys, scores, use_acc=False, is_async=True)
    if C.dk_rest:
        rest = k[1].index(slot).permute((1, 0))
        scores = warpgroup_mma(q[1].index(WG + zero), rest, scores, is_async=True)
    return scores


@gluon.jit
def issue_values(carried, v, slot, acc, C: gl.constexpr):
    """Add the weighted values of one tile to the accumulator, under way; and their operand."""
    p = carried_weights(carried, acc[0], v[0].dtype, C)
    main = warpgroup_mma(p, v[0].index(slot), acc[0], is_async=True)
    rest = acc[1]
    if C.dv_rest:
        layout: gl.constexpr = gl.DotOperandLayout(0, acc[1].type.layout, 2)
        p = gl.convert_layout(p, layout, assert_trivial=True)
        rest = warpgroup_mma(p, v[1].index(slot), rest, is_async=True)
    return (main, rest), p


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    """The accumulator times one factor a row."""
    main, rest = acc
    layout: gl.constexpr = gl.SliceLayout(1, main.type.layout)
    main = main * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]
    if C.dv_rest:
        layout_rest: gl.constexpr = gl.SliceLayout(1, rest.type.layout)
        rest = rest * gl.convert_layout(factor, layout_rest, assert_trivial=True)[:, None]
    return main, rest


@gluon.jit
def thread_sums(weights, C: gl.constexpr):
    """Row sums over each thread's own columns, [64, block_n] to [64, 4]: no shuffle in the loop."""
    OCTETS: gl.constexpr = C.block_n // 8
    return gl.sum(gl.sum(gl.reshape(weights, [64, OCTETS, 4, 2]), 3), 1)


@gluon.jit
def masked(scores, tile, tokens, span, window, tree_rows, tree_width, C: gl.constexpr):
    """Scores, -inf where a token does not see a key."""
    q_len, seq_len = span
    keys = tile * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, scores.type.layout))
    if tree_rows is not None:
        tree_rows = tree_rows[:, None]
    seen = visible(
        tokens[:, None], keys[None, :], q_len, seq_len, window, tree_rows, tree_width, C.causal
    )
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def logits_of(scores, tile, tokens, span, full, rules, tree_rows, tree_width, C: gl.constexpr):
    """Scores after softcap and mask; `base2_scale` turns them into logits in base 2.

    All tokens see all keys of the tiles `full`.
    """
    if rules.softcap is not None:
        scores = capped(scores, rules.scale, rules.softcap)
    if (tile < full[0]) | (tile >= full[1]):
        scores = masked(scores, tile, tokens, span, rules.window, tree_rows, tree_width, C)
    return scores


@gluon.jit
def base2_scale(rules):
    """From what `logits_of` returns to logits in base 2."""
    if rules.softcap is not None:
        return LOG2_E
    else:
        return rules.scale


@gluon.jit
def attend_tile(
    q, q_main, k, v, bars, state, done, count, num_tiles, tile, tokens, span, full, rules,
    tree_rows, tree_width, C: gl.constexpr, WG: gl.constexpr,
):  # fmt: skip
    """Scores of this tile while the weights of the one before multiply its values; new weights.

    `done` tiles of V are finished by this warpgroup, `count` of this item are scored.
    """
    acc, carried, total, peak = state
    _, _, k_full, v_full = bars
    slot = (done + 1) % C.stages
    value_slot = done % C.stages
    zero = hidden_zero(done) if C.dk_rest else 0
    scores = issue_scores(q, q_main, k, slot, zero, C, WG)
    mbarrier.wait(v_full.index(value_slot), (done // C.stages) & 1)
    acc, p = issue_values(carried, v, value_slot, acc, C)
    scores = warpgroup_mma_wait(2 if C.dv_rest else 1, [scores])
    bar_arrive(K_FREE + slot, PAIR_AND_PRODUCER)
    scores = logits_of(scores, tile, tokens, span, full, rules, tree_rows, tree_width, C)
    scale = base2_scale(rules)
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    pivot = pivot_of(new_peak * scale)
    alpha = exp2(peak * scale - pivot)
    weights = exp2(scores * scale - pivot[:, None])
    kept = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    total = total * kept[:, None] + thread_sums(weights, C)
    # The next keys are waited for here, not at the top: ptxas lifts the wait for P V (below) above
    # arithmetic, but not above this branch.
    next_slot = (done + 2) % C.stages
    mbarrier.wait(k_full.index(next_slot), ((done + 2) // C.stages) & 1, pred=count + 1 < num_tiles)
    if C.dv_rest:
        main, rest, p, weights = warpgroup_mma_wait(0, [acc[0], acc[1], p, weights])
        acc = (main, rest)
    else:
        main, p, weights = warpgroup_mma_wait(0, [acc[0], p, weights])
        acc = (main, acc[1])
    bar_arrive(V_FREE + value_slot, PAIR_AND_PRODUCER)
    carried = carry_weights(weights, acc[0], v[0].dtype, C)
    return rescaled(acc, alpha, C), carried, total, new_peak


@gluon.jit
def first_weights(q, q_main, k, bars, done, tile, tokens, span, rules, tree_rows,
                  tree_width, C: gl.constexpr, WG: gl.constexpr):  # fmt: skip
    """Weights of an item's last tile, with nothing to multiply meanwhile."""
    _, _, k_full, _ = bars
    slot = done % C.stages
    mbarrier.wait(k_full.index(slot), (done // C.stages) & 1)
    scores = issue_scores(q, q_main, k, slot, 0, C, WG)
    scores = warpgroup_mma_wait(0, [scores])
    bar_arrive(K_FREE + slot, PAIR_AND_PRODUCER)
    scores = logits_of(scores, tile, tokens, span, (0, 0), rules, tree_rows, tree_width, C)
    scale = base2_scale(rules)
    peak = gl.max(scores, 1)
    weights = exp2(scores * scale - pivot_of(peak * scale)[:, None])
    return weights, peak
