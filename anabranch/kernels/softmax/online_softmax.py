"""The state as a value inside a kernel: the one online softmax and the one merge.

A running state is (peak, total, acc) with logits in base 2: peak is the largest logit so far,
total the sum of 2^(logit - peak), acc the same sum weighted by the values. -inf stays in the
peak; only the pivot that is subtracted is made finite, so an empty state stays empty.
A running merge is the same with LSEs for logits, in natural log as they come: their differences
are exact in float32, those of scaled LSEs are not.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
    state,
    scores,
    scale,
    v,
    value_scales,
    row_units,
    SHIFTED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    ORDER: tl.constexpr,
):
    """Attend to one more tile of keys: logits are scores times scale > 0.

    Scores are in units `row_units` [ROWS] where that is not None. Values are `v`, times
    `value_scales` [KEYS] where that is not None; ORDER puts weights into the order of their keys.
    SHIFTED, the peak is that of logits plus the
    exponents of these scales: then weights times scales are at most 2, which float16 holds.

    Scores are [ROWS, KEYS] and acc is [ROWS, DIM]; with KEYS_FIRST both are transposed, so that few
    rows are the narrow side of the matrix unit instead of padding its wide one. There a sum over
    keys crosses warps, so total stays a tile [KEYS, ROWS] until the end.
    """
    peak, total, acc = state
    row_scale = scale
    if row_units is not None:
        scale = scale * row_units
        row_scale = scale[None, :] if KEYS_FIRST else scale[:, None]
    if KEYS_FIRST:
        if SHIFTED:
            tops = tl.max(scores * row_scale + exponent_of(value_scales)[:, None], 0)
        else:
            tops = tl.max(scores, 0) * scale
        new_peak = tl.maximum(peak, tops)
        pivot = pivot_of(new_peak)
        keep = tl.exp2(peak - pivot)
        weights = tl.exp2(scores * row_scale - pivot[None, :])
        factors = weights
        if value_scales is not None:
            factors = weights * value_scales[:, None]
        if ORDER is not None:
            factors = ORDER(factors)
        values = tl.trans(v)
        acc = tl.dot(values, factors.to(v.dtype), acc * keep[None, :], input_precision="ieee")
        total = total * keep[None, :] + weights
    else:
        if SHIFTED:
            tops = tl.max(scores * row_scale + exponent_of(value_scales)[None, :], 1)
        else:
            tops = tl.max(scores, 1) * scale
        new_peak = tl.maximum(peak, tops)
        pivot = pivot_of(new_peak)
        keep = tl.exp2(peak - pivot)
        weights = tl.exp2(scores * row_scale - pivot[:, None])
        factors = weights
        if value_scales is not None:
            factors = weights * value_scales[None, :]
        factors = factors.to(v.dtype)
        acc = acc * keep[:, None]
        acc = tl.dot(factors, v, acc, input_precision="ieee")
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
def merge_part(state, out, lse):
    """Merge one finished part (out [ROWS, DIM], lse [ROWS]) into a running merge.

    A running merge is a running state whose peak is in natural log, as the lse is: scaled to base 2
    before the subtraction, an lse of 100 loses a digit. Products and sums are fused here, not by
    the compiler: a fold over parts has the same bits wherever it is done.
    """
    peak, total, acc = state
    new_peak = tl.maximum(peak, lse)
    pivot = pivot_of(new_peak)
    keep = tl.exp2((peak - pivot) * LOG2_E)
    weight = tl.exp2((lse - pivot) * LOG2_E)
    acc = tl.fma(acc, keep[:, None], out.to(tl.float32) * weight[:, None])
    return new_peak, tl.fma(total, keep, weight), acc


@triton.jit
def merge_batch(state, outs, lses, COUNT: tl.constexpr):
    """`merge_part` for a tuple of parts at once, whose loads then do not wait for each other."""
    peak, total, acc = state
    new_peak = peak
    for i in tl.static_range(COUNT):
        new_peak = tl.maximum(new_peak, lses[i])
    pivot = pivot_of(new_peak)
    keep = tl.exp2((peak - pivot) * LOG2_E)
    acc *= keep[:, None]
    total *= keep
    for i in tl.static_range(COUNT):
        weight = tl.exp2((lses[i] - pivot) * LOG2_E)
        acc += outs[i].to(tl.float32) * weight[:, None]
        total += weight
    return new_peak, total, acc


@triton.jit
def finish_state(state):
    """The state as the library's convention has it: out, and lse in natural log.

    The lse is rounded here: a product, the compiler would join with what is subtracted from it in a
    merge that follows, and not in one that loads it.
    """
    peak, total, acc = state
    out = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    return out, tl.fma(pivot_of(peak) + tl.log2(total), LN_2, 0.0)


@triton.jit
def finish_merge(state):
    """What `finish_state` is to a running state, for a running merge."""
    peak, total, acc = state
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return out, tl.fma(tl.log2(total), LN_2, pivot_of(peak))
