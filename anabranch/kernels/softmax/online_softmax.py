"""From scores to the state of a block: masks, logits and the one online softmax.

Tokens stand at the end of the keys: token t of a sequence has position seq_len - q_len + t.

A running state is (peak, total, acc) with logits in base 2: peak is the largest logit so far,
total the sum of 2^(logit - peak), acc the same sum weighted by the values. -inf stays in the
peak; only the pivot that is subtracted is made finite, so an empty state stays empty.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def seen_by_any(first_token, last_token, q_len, seq_len, window, CAUSAL: tl.constexpr):
    """The keys [start, stop) that some token of [first_token, last_token] can see."""
    shift = seq_len - q_len
    start = first_token * 0
    stop = seq_len
    if CAUSAL:
        stop = tl.minimum(tl.maximum(shift + last_token + 1, 0), seq_len)
    if window is not None:
        start = tl.maximum(shift + first_token - window + 1, 0)
    return tl.minimum(start, stop), stop


@triton.jit
def seen_by_all(first_token, last_token, block, rules, CAUSAL: tl.constexpr):
    """The keys [start, stop) that every token of [first_token, last_token] can see."""
    shift = block.seq_len - block.q_len
    start = first_token * 0
    stop = block.seq_len
    if rules.tree_mask is not None:
        stop = tl.maximum(shift, 0)
    elif CAUSAL:
        stop = tl.minimum(tl.maximum(shift + first_token + 1, 0), block.seq_len)
    if rules.window is not None:
        start = tl.maximum(shift + last_token - rules.window + 1, 0)
    return tl.minimum(start, stop), stop


@triton.jit
def visible(
    tokens,
    keys,
    block,
    window,
    tree_rows,  # pointers or None
    tree_width,
    CAUSAL: tl.constexpr,
    ONE_BOUND: tl.constexpr = False,
):
    """Whether each of `tokens` attends to each of `keys`, index tensors that broadcast together.

    `tree_rows` points at each token's row of the tree mask, which says which of the sequence's own
    new tokens it sees and takes the place of the causal rule among them. With ONE_BOUND, the causal
    rule and the length are one comparison a key, with a bound made for each token.
    """
    seq_len = block.seq_len
    shift = seq_len - block.q_len
    if CAUSAL and ONE_BOUND and tree_rows is None:
        mask = keys <= tl.minimum(shift + tokens, seq_len - 1)
    else:
        mask = keys < seq_len
    if tree_rows is not None:
        newest = keys - shift
        listed = (newest >= 0) & (newest < tree_width) & (keys < seq_len)
        shown = tl.load(tree_rows + newest, listed, other=0) != 0
        mask = mask & ((newest < 0) | shown)
    elif CAUSAL and not ONE_BOUND:
        mask = mask & (keys <= shift + tokens)
    if window is not None:
        mask = mask & (keys > shift + tokens - window)
    return mask


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
def score(q, k, scores, KEYS_FIRST: tl.constexpr, TURNED: tl.constexpr = False):
    """scores + q k^T [ROWS, KEYS], or its transpose with KEYS_FIRST; q may be TURNED already."""
    if KEYS_FIRST:
        if not TURNED:
            q = tl.trans(q)
        return tl.dot(k, q, scores, input_precision="ieee")
    else:
        return tl.dot(q, tl.trans(k), scores, input_precision="ieee")


@triton.jit
def masked(scores, keys, queries, block, rules, tree_width, C: tl.constexpr):
    """Scores, -inf where a token does not see a key."""
    AXIS: tl.constexpr = 0 if C.tiles.keys_first else 1  # of keys
    tree_rows = queries.tree_rows
    if tree_rows is not None:
        tree_rows = tl.expand_dims(tree_rows, AXIS)
    seen = visible(
        tl.expand_dims(queries.tokens, AXIS),
        tl.expand_dims(keys, 1 - AXIS),
        block,
        rules.window,
        tree_rows,
        tree_width,
        C.causal,
        not C.source.is_plain,
    )
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def logits_of(scores, scale, units, index, at, tiles, queries, item, given, C: tl.constexpr):
    """Scores after softcap, log-weights and mask; times the scale, they are logits in base 2."""
    block, rules, view = item.block, given.rules, given.view
    # Units of rows are multiplied into scores where these are not logits but for a scale.
    if C.source.k.words and (rules.softcap is not None or view.log_weights is not None):
        scores *= units[None, :] if C.tiles.keys_first else units[:, None]
    if rules.softcap is not None:
        if queries.main.dtype == tl.float32:
            scores = capped_exactly(scores, scale, rules.softcap)
        else:
            scores = capped(scores, scale, rules.softcap)
        scale = LOG2_E
    if view.log_weights is not None:
        keys = tl.minimum(at.keys, at.last)
        row = view.log_weights + block.origin.to(tl.int64) * given.table_stride
        scores = weighted(scores, scale, row + keys, C.tiles.keys_first)
        scale = LOG2_E
    is_edge = True  # a short block waits for memory and has time to mask every tile
    if C.tiles.block_m >= 64:
        is_edge = (index < tiles.full_start) | (index >= tiles.full_stop)
    if is_edge:
        scores = masked(scores, at.keys, queries, block, rules, given.tree_width, C)
    return scores, scale


@triton.jit
def pivot_of(peak):
    """The peak, or 0 where nothing was attended."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def exponent_of(x):
    """The exponents of positive float32 numbers, as float32; -100 for smaller ones and for 0."""
    exponents = (x.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponents.to(tl.float32), -100.0)


@triton.jit
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state over no keys."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def sink_state(logits):
    """Peak and total of one key with these logits (natural log) and a value of zero."""
    return logits * LOG2_E, tl.where(logits == float("-inf"), 0.0, 1.0)


@triton.jit
def update_state(
    state, scores, scale, v, value_scales, row_units, ORDER: tl.constexpr, C: tl.constexpr
):
    """Attend to one more tile of keys: logits are scores times scale > 0.

    Scores are in units `row_units` [ROWS] where that is not None. Values are `v`, times
    `value_scales` [KEYS] where that is not None; ORDER puts weights into the order of their keys.
    Where values are codes with a scale a key, the peak is that of logits plus the exponents of
    these scales: then weights times scales are at most 2, which float16 holds.

    Scores are [ROWS, KEYS] and acc is [ROWS, DIM]; with keys_first both are transposed, so that few
    rows are the narrow side of the matrix unit instead of padding its wide one. There a sum over
    keys crosses warps, so total stays a tile [KEYS, ROWS] until the end.
    """
    KEYS_FIRST: tl.constexpr = C.tiles.keys_first
    SHIFTED: tl.constexpr = C.source.v.words and C.source.v.format.scaling == "key"
    peak, total, acc = state
    AXIS: tl.constexpr = 0 if KEYS_FIRST else 1  # of keys
    row_scale = scale
    if row_units is not None:
        scale = scale * row_units
        row_scale = tl.expand_dims(scale, AXIS)
    if SHIFTED:
        shifts = tl.expand_dims(exponent_of(value_scales), 1 - AXIS)
        tops = tl.max(scores * row_scale + shifts, AXIS)
    else:
        tops = tl.max(scores, AXIS) * scale
    new_peak = tl.maximum(peak, tops)
    pivot = pivot_of(new_peak)
    keep = tl.exp2(peak - pivot)
    weights = tl.exp2(scores * row_scale - tl.expand_dims(pivot, AXIS))
    factors = weights
    if value_scales is not None:
        factors = weights * tl.expand_dims(value_scales, 1 - AXIS)
    if ORDER is not None:
        factors = ORDER(factors)
    values = tl.trans(v) if KEYS_FIRST else v
    factors = factors.to(v.dtype)
    acc = acc * tl.expand_dims(keep, AXIS)
    if KEYS_FIRST:
        acc = tl.dot(values, factors, acc, input_precision="ieee")
        total = total * keep[None, :] + weights
    else:
        acc = tl.dot(factors, values, acc, input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
    return new_peak, total, acc


@triton.jit
def in_groups(tile):
    """As [ROWS, 2, KEYS / 16, 4, 2]: NVIDIA's matrix unit leaves axes 2 and 4 to a thread."""
    return tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 16, 4, 2])


@triton.jit
def spread_total(total):
    """A total [ROWS] as `update_lazily` has it, which adds up the sums over axes 2 and 4 alone."""
    places = tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.where((places == 0)[None, :, :], total[:, None, None], 0.0)


@triton.jit
def update_lazily(state, scores, scale, v, value_scales):
    """`update_state` with a lazy peak, for tiles of 16 keys or more; total is [ROWS, 2, 4].

    A peak is kept until a logit exceeds it by 8 bits, and sums are scaled only then: weights are at
    most 256. Whether any logit does is all that warps have to agree upon, and sums over keys are
    left as they lie in threads.
    """
    peak, total, acc = state
    limit = peak + 8.0
    heights = tl.max(tl.max(in_groups(scores), 4), 2) * scale
    if tl.max((heights > limit[:, None, None]).to(tl.int32)) > 0:
        tops = tl.max(scores, 1) * scale
        new_peak = tl.where(tops > limit, tops, peak)
        keep = tl.exp2(peak - pivot_of(new_peak))
        peak, total, acc = new_peak, total * keep[:, None, None], acc * keep[:, None]
    weights = tl.exp2(scores * scale - pivot_of(peak)[:, None])
    total += tl.sum(tl.sum(in_groups(weights), 4), 2)
    factors = weights
    if value_scales is not None:
        factors = weights * value_scales[None, :]
    acc = tl.dot(factors.to(v.dtype), v, acc, input_precision="ieee")
    return peak, total, acc


@triton.jit
def finish_state(state):
    """The state as the library's convention has it: out, and lse in natural log.

    The lse is rounded here: a product, the compiler would join with what is subtracted from it in a
    merge that follows, and not in one that loads it.
    """
    peak, total, acc = state
    out = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    return out, tl.fma(pivot_of(peak) + tl.log2(total), LN_2, 0.0)
