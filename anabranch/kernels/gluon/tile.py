"""One tile of keys in a consumer: scores, weights, and the weighted values of the tile before."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anabranch.kernels.gluon.barriers import (
    BOTH_AND_PRODUCER,
    K_FREE,
    V_FREE,
    bar_arrive,
    carried_weights,
    carry_weights,
    exp2,
    hidden_zero,
    tanh,
)
from anabranch.kernels.gluon.operands import FullTiles, Running
from anabranch.kernels.softmax.online_softmax import LN_2, LOG2_E, pivot_of, visible


@gluon.jit
def issue_scores(q, q_main, k, slot, zero, C: gl.constexpr, WG: gl.constexpr):
    """Q K^T of one tile, under way."""
    BLOCK_N: gl.constexpr = C.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    scores = gl.zeros([64, BLOCK_N], gl.float32, layout)
    keys = k.main.index(slot)
    FIRST: gl.constexpr = C.q_columns
    OTHERS: gl.constexpr = C.dk_main - FIRST
    if OTHERS:  # before the others, whose registers 3.9 copies: the copies wait for nothing then
        queries, their_keys = q.main.index(WG + zero), keys
        if FIRST:
            queries, their_keys = queries.slice(FIRST, OTHERS, 1), keys.slice(FIRST, OTHERS, 1)
            keys = keys.slice(0, FIRST, 1)
        their_keys = their_keys.permute((1, 0))
        scores = warpgroup_mma(queries, their_keys, scores, use_acc=False, is_async=True)
    if FIRST:
        keys = keys.permute((1, 0))
        scores = warpgroup_mma(q_main, keys, scores, use_acc=OTHERS > 0, is_async=True)
    if C.dk_rest:
        rest = k.rest.index(slot).permute((1, 0))
        scores = warpgroup_mma(q.rest.index(WG + zero), rest, scores, is_async=True)
    return scores


@gluon.jit
def issue_values(carried, v, slot, acc, C: gl.constexpr):
    """Add the weighted values of one tile to the accumulator, under way; and their operand."""
    p = carried_weights(carried, acc[0], v.main.dtype, C)
    main = warpgroup_mma(p, v.main.index(slot), acc[0], is_async=True)
    rest = acc[1]
    if C.dv_rest:
        layout: gl.constexpr = gl.DotOperandLayout(0, acc[1].type.layout, 2)
        p = gl.convert_layout(p, layout, assert_trivial=True)
        rest = warpgroup_mma(p, v.rest.index(slot), rest, is_async=True)
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
def masked(scores, tile, sight, window, C: gl.constexpr):
    """Scores, -inf where a token does not see a key."""
    keys = tile * C.block_n + gl.arange(0, C.block_n, gl.SliceLayout(0, scores.type.layout))
    tree_rows = sight.tree_rows
    if tree_rows is not None:
        tree_rows = tree_rows[:, None]
    tokens, width = sight.tokens[:, None], sight.tree_width
    seen = visible(tokens, keys[None, :], sight.block, window, tree_rows, width, C.causal)
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def logits_of(scores, tile, full, sight, rules, C: gl.constexpr):
    """Scores after softcap and mask; `base2_scale` turns them into logits in base 2.

    All rows see all keys of the tiles [full.start, full.stop).
    """
    if rules.softcap is not None:
        scores = tanh(scores * (rules.scale * LN_2 / rules.softcap))
        if C.caps_before_base:
            scores = rules.softcap * scores
    if (tile < full.start) | (tile >= full.stop):
        scores = masked(scores, tile, sight, rules.window, C)
    return scores


@gluon.jit
def base2_scale(rules, C: gl.constexpr):
    """From what `logits_of` returns to logits in base 2."""
    if rules.softcap is None:
        return rules.scale
    elif C.caps_before_base:
        return LOG2_E
    else:
        return LOG2_E * rules.softcap


@gluon.jit
def attend_tile(
    q, q_main, k, v, state, done, count, tile, full, sight, rules, C: gl.constexpr, WG: gl.constexpr
):
    """Scores of this tile while the weights of the one before multiply its values; new weights.

    `done` tiles of V are finished by this warpgroup, `count` of this item are scored.
    """
    slot = (done + 1) % C.stages
    value_slot = done % C.stages
    zero = hidden_zero(done) if C.dk_rest else 0
    scores = issue_scores(q, q_main, k, slot, zero, C, WG)
    mbarrier.wait(v.full.index(value_slot), (done // C.stages) & 1)
    acc, p = issue_values(state.carried, v, value_slot, state.acc, C)
    scores = warpgroup_mma_wait(2 if C.dv_rest else 1, [scores])
    bar_arrive(K_FREE + slot, BOTH_AND_PRODUCER)
    scores = logits_of(scores, tile, full, sight, rules, C)
    scale = base2_scale(rules, C)
    # Peaks are carried in base 2: the product of one would be fused into the difference below, and
    # alpha would not be 1 where the peak stays, an error that grows with the number of tiles.
    peak = gl.maximum(state.peak, gl.max(scores, 1) * scale)
    pivot = pivot_of(peak)
    alpha = exp2(state.peak - pivot)
    weights = exp2(scores * scale - pivot[:, None])
    kept = gl.convert_layout(alpha, gl.SliceLayout(1, state.total.type.layout), assert_trivial=True)
    total = state.total * kept[:, None] + thread_sums(weights, C)
    # The next keys are waited for here, not at the top: ptxas lifts the wait for P V (below) above
    # arithmetic, but not above this branch.
    next_slot = (done + 2) % C.stages
    has_next = count + 1 < sight.block.num_tiles
    mbarrier.wait(k.full.index(next_slot), ((done + 2) // C.stages) & 1, pred=has_next)
    if C.dv_rest:
        main, rest, p, weights = warpgroup_mma_wait(0, [acc[0], acc[1], p, weights])
        acc = (main, rest)
    else:
        main, p, weights = warpgroup_mma_wait(0, [acc[0], p, weights])
        acc = (main, acc[1])
    bar_arrive(V_FREE + value_slot, BOTH_AND_PRODUCER)
    carried = carry_weights(weights, acc[0], v.main.dtype, C)
    return Running(rescaled(acc, alpha, C), carried, total, peak)


@gluon.jit
def first_weights(q, q_main, k, done, tile, sight, rules, C: gl.constexpr, WG: gl.constexpr):
    """Weights of an item's last tile, with nothing to multiply meanwhile; it is always masked."""
    slot = done % C.stages
    mbarrier.wait(k.full.index(slot), (done // C.stages) & 1)
    scores = issue_scores(q, q_main, k, slot, 0, C, WG)
    scores = warpgroup_mma_wait(0, [scores])
    bar_arrive(K_FREE + slot, BOTH_AND_PRODUCER)
    scores = logits_of(scores, tile, FullTiles(0, 0), sight, rules, C)
    scale = base2_scale(rules, C)
    peak = gl.max(scores, 1) * scale
    weights = exp2(scores * scale - pivot_of(peak)[:, None])
    return weights, peak
