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
def empty_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state over no keys."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def sink_state(logits):
    """Peak and total of one key with these logits (natural log) and a value of zero."""
    return logits * LOG2_E, tl.where(logits == float("-inf"), 0.0, 1.0)


@triton.jit
def update_state(state, scores, scale, v, value_scales, KEYS_FIRST: tl.constexpr):
    """Attend to one more tile of keys: logits are scores times scale > 0.

    Values are `v`, times `value_scales` [KEYS] where that is not None.

    Scores are [ROWS, KEYS] and acc is [ROWS, DIM]; with KEYS_FIRST both are transposed, so that few
    rows are the narrow side of the matrix unit instead of padding its wide one. There a sum over
    keys crosses warps, so total stays a tile [KEYS, ROWS] until the end.
    """
    peak, total, acc = state
    if KEYS_FIRST:
        new_peak = tl.maximum(peak, tl.max(scores, 0) * scale)
        pivot = pivot_of(new_peak)
        keep = tl.exp2(peak - pivot)
        weights = tl.exp2(scores * scale - pivot[None, :])
        factors = weights
        if value_scales is not None:
            factors = weights * value_scales[:, None]
        values = tl.trans(v)
        acc = tl.dot(values, factors.to(v.dtype), acc * keep[None, :], input_precision="ieee")
        total = total * keep[None, :] + weights
    else:
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        pivot = pivot_of(new_peak)
        keep = tl.exp2(peak - pivot)
        weights = tl.exp2(scores * scale - pivot[:, None])
        factors = weights
        if value_scales is not None:
            factors = weights * value_scales[None, :]
        acc = tl.dot(factors.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        total = total * keep + tl.sum(weights, 1)
    return new_peak, total, acc


@triton.jit
def merge_part(state, out, lse):
    """Merge one finished part (out [ROWS, DIM], lse [ROWS]) into a running merge.

    A running merge is a running state whose peak is in natural log, as the lse is: scaled to base 2
    before the subtraction, an lse of 100 loses a digit.
    """
    peak, total, acc = state
    new_peak = tl.maximum(peak, lse)
    pivot = pivot_of(new_peak)
    keep = tl.exp2((peak - pivot) * LOG2_E)
    weight = tl.exp2((lse - pivot) * LOG2_E)
    acc = acc * keep[:, None] + out.to(tl.float32) * weight[:, None]
    return new_peak, total * keep + weight, acc


@triton.jit
def finish_state(state):
    """The state as the library's convention has it: out, and lse in natural log."""
    peak, total, acc = state
    out = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    return out, (pivot_of(peak) + tl.log2(total)) * LN_2


@triton.jit
def finish_merge(state):
    """What `finish_state` is to a running state, for a running merge."""
    peak, total, acc = state
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return out, pivot_of(peak) + tl.log2(total) * LN_2
