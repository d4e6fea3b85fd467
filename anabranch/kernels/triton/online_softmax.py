"""The state as a value inside a kernel: the one online softmax and the one merge.

A running state is (peak, total, acc) with logits in base 2: peak is the largest logit so far,
total the sum of 2^(logit - peak), acc the same sum weighted by the values. -inf stays in the
peak; only the pivot that is subtracted is made finite, so an empty state stays empty.
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
def merge_part(state, out, lse):
    """Merge a finished part (out [ROWS, DIM], lse [ROWS], natural log) into a running state."""
    peak, total, acc = state
    logit = lse * LOG2_E
    new_peak = tl.maximum(peak, logit)
    pivot = pivot_of(new_peak)
    keep = tl.exp2(peak - pivot)
    weight = tl.exp2(logit - pivot)
    acc = acc * keep[:, None] + out.to(tl.float32) * weight[:, None]
    return new_peak, total * keep + weight, acc


@triton.jit
def finish_state(state):
    """The state as the library's convention has it: out, and lse in natural log."""
    peak, total, acc = state
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return out, (pivot_of(peak) + tl.log2(total)) * LN_2
