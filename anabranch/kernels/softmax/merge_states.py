"""The merge of states inside kernels: finished parts into a running merge.

A running merge is a running state (peak, total, acc) with LSEs for logits, in natural log as they
come: their differences are exact in float32, those of scaled LSEs are not.
"""

import triton
import triton.language as tl

from anabranch.kernels.softmax.online_softmax import LN_2, LOG2_E, pivot_of


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
def finish_merge(state):
    """What `finish_state` is to a running state, for a running merge."""
    peak, total, acc = state
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return out, tl.fma(tl.log2(total), LN_2, pivot_of(peak))
