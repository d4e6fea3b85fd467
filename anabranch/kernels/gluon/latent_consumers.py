"""The two consumers of latent tiles: each scores one half of a tile's keys and owns half of the
columns of the output.

The left one takes the even half, columns 0 to 255, the right one the odd half, columns 256 to 511.
Each needs the other's weights, which pass through shared memory with the peaks of their rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import bar_arrive, bar_sync, exp2, hidden_zero
from anabranch.kernels.gluon.latent_copies import (
    CONSUMER_AND_PRODUCER,
    EVEN_DONE,
    L_FREE,
    ODD_DONE,
    R_FREE,
)
from anabranch.kernels.gluon.latent_finish import finish_latent, write_empty_blocks
from anabranch.kernels.gluon.tile import base2_scale, logits_of, thread_sums
from anabranch.kernels.gluon.versions import thread_barrier
from anabranch.kernels.schedule.walk import begin_walk, take_item
from anabranch.kernels.softmax.masks import seen_by_all
from anabranch.kernels.softmax.online_softmax import pivot_of

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))


@gluon.jit
def score_half(q, q_rest, k, full, zero, phase, HALF: gl.constexpr):
    """Q K^T of one half of a tile, as soon as its columns arrive."""
    q_left, q_right = q
    k_left, k_right, k_rest = k
    full_left, full_right = full
    s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    mbarrier.wait(full_left.index(HALF), phase)
    keys = k_left.index(zero + HALF).permute((1, 0))
    s = warpgroup_mma(q_left.index(zero), keys, s, use_acc=False, is_async=True)
    mbarrier.wait(full_right.index(HALF), phase)
    keys = k_right.index(zero + HALF).permute((1, 0))
    s = warpgroup_mma(q_right.index(zero), keys, s, is_async=True)
    s = warpgroup_mma(q_rest, k_rest.index(zero + HALF).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def scaled(x, factor):
    """A tile times one factor a row."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def clear_latent_tail(values, full, phase, valid):
    """Clear values past the end of the sequence: a weight of 0 times NaN would be NaN.

    Each consumer clears its own columns, of both halves. Scores of these keys are masked, so
    the other may read them meanwhile.
    """
    if valid < 128:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for half in gl.static_range(2):
            mbarrier.wait(full.index(half), phase)
            for part in gl.static_range(4):
                rows = values.index(half).slice(16 * part, 16, 0)
                keys = 64 * half + 16 * part + gl.arange(0, 16, gl.SliceLayout(1, layout))
                kept = gl.where((keys < valid)[:, None], rows.load(layout), 0.0)
                rows.store(kept.to(values.dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def attend_even(
    q, q_rest, k, exchange, full, state, done, half, tokens, span, seen, rules, tree_rows,
    tree_width, C: gl.constexpr,
):  # fmt: skip
    """The left consumer's turn: score the even half, weigh the left columns of both."""
    acc, totals, peak = state
    p_even, p_odd, peak_even, peak_odd = exchange
    scale = base2_scale(rules)
    zero = hidden_zero(done)
    s = score_half(q, q_rest, k, full, zero, done & 1, 0)
    s = logits_of(s, half, tokens, span, seen, rules, tree_rows, tree_width, C)
    even = gl.maximum(peak, gl.max(s, 1))
    pivot = pivot_of(even * scale)
    s = exp2(s * scale - pivot[:, None])
    p = s.to(p_even.dtype)
    p_even.store(p)
    peak_even.store(even)
    bar_arrive(EVEN_DONE, 256)
    keep = exp2(peak * scale - pivot)
    totals = scaled(totals, keep) + thread_sums(s, C)
    acc = scaled(acc, keep)
    p = gl.convert_layout(p, WEIGHTS)
    acc = warpgroup_mma(p, k[0].index(zero), acc, is_async=True)
    bar_sync(ODD_DONE, 256)
    peak = peak_odd.load(ROW)
    keep = exp2(even * scale - pivot_of(peak * scale))
    totals = scaled(totals, keep)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    bar_arrive(L_FREE, CONSUMER_AND_PRODUCER)
    acc = scaled(acc, keep)
    acc = warpgroup_mma(p_odd, k[0].index(zero + 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    bar_arrive(L_FREE + 1, CONSUMER_AND_PRODUCER)
    return acc, totals, peak


@gluon.jit
def attend_odd(
    q, q_rest, k, exchange, full, state, done, half, tokens, span, seen, rules, tree_rows,
    tree_width, C: gl.constexpr,
):  # fmt: skip
    """The right consumer's turn: score the odd half, weigh the right columns of both."""
    acc, totals, peak = state
    p_even, p_odd, peak_even, peak_odd = exchange
    scale = base2_scale(rules)
    zero = hidden_zero(done)
    s = score_half(q, q_rest, k, full, zero, done & 1, 1)
    s = logits_of(s, half, tokens, span, seen, rules, tree_rows, tree_width, C)
    own = gl.max(s, 1)
    bar_sync(EVEN_DONE, 256)
    even = peak_even.load(ROW)
    p = p_even.load(WEIGHTS)
    odd = gl.maximum(even, own)
    pivot = pivot_of(odd * scale)
    s = exp2(s * scale - pivot[:, None])
    p_own = s.to(p_odd.dtype)
    p_odd.store(p_own)
    peak_odd.store(odd)
    fence_async_shared()
    bar_arrive(ODD_DONE, 256)
    keep = exp2(peak * scale - pivot)
    totals = scaled(totals, keep) + thread_sums(s, C)
    acc = scaled(acc, keep)
    p = scaled(p.to(gl.float32), exp2(even * scale - pivot)).to(p_odd.dtype)
    acc = warpgroup_mma(p, k[1].index(zero), acc, is_async=True)
    p_own = gl.convert_layout(p_own, WEIGHTS)
    acc = warpgroup_mma(p_own, k[1].index(zero + 1), acc, is_async=True)
    acc, p, p_own = warpgroup_mma_wait(1, [acc, p, p_own])
    bar_arrive(R_FREE, CONSUMER_AND_PRODUCER)
    acc, p_own = warpgroup_mma_wait(0, [acc, p_own])
    bar_arrive(R_FREE + 1, CONSUMER_AND_PRODUCER)
    return acc, totals, odd


@gluon.jit
def consume_latent(
    q, k, exchange, sums, full, q_full, out_desc, rules, tree_ptr, tree_width, out_rows, lse_rows,
    schedule_ptr, parts, C: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Attend to one item after another, to the end of the share."""
    W: gl.constexpr = C.work
    GROUP: gl.constexpr = W.group
    worker, pack = gl.program_id(0) // C.num_packs, gl.program_id(0) % C.num_packs
    done = 0  # tiles
    taken = 0  # items
    if C.overlap:
        gdc_wait()
    walk = begin_walk(schedule_ptr, worker, W)
    _, block, tiles, _ = take_item(schedule_ptr, walk, worker, W)
    while tiles[0] < tiles[1]:
        _, first_row, q_start, q_len, seq_len = block
        first_tile, stop = tiles
        rows = first_row + gl.arange(0, 64, ROW)
        tokens = rows // GROUP
        tree_rows = None
        if tree_ptr is not None:
            last_token = gl.minimum(tokens, q_len - 1)
            tree_rows = tree_ptr + (q_start + last_token).to(gl.int64) * tree_width
        last_row = gl.minimum(first_row + 64, q_len * GROUP) - 1
        full_start, full_stop = seen_by_all(
            first_row // GROUP, last_row // GROUP, q_len, seq_len, rules.window, tree_ptr, C.causal
        )
        seen = ((full_start + 63) // 64, full_stop // 64)  # halves of tiles
        mbarrier.wait(q_full, taken & 1)
        q_rest = exchange[1].load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        peak = gl.full([64], -float("inf"), gl.float32, ROW)
        totals = thread_sums(gl.zeros([64, 64], gl.float32, S_LAYOUT), C)
        acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
        clear_latent_tail(k[HALF], full[HALF], done & 1, seq_len - (stop - 1) * 128)
        state = (acc, totals, peak)
        for count in range(0, stop - first_tile):
            half = 2 * (stop - 1 - count) + HALF
            if HALF == 0:
                state = attend_even(
                    q, q_rest, k, exchange, full, state, done, half, tokens, (q_len, seq_len),
                    seen, rules, tree_rows, tree_width, C,
                )  # fmt: skip
            else:
                state = attend_odd(
                    q, q_rest, k, exchange, full, state, done, half, tokens, (q_len, seq_len),
                    seen, rules, tree_rows, tree_width, C,
                )  # fmt: skip
            done += 1
        acc, totals, peak = state
        taken += 1
        # The item is read again, so that the loop needs no registers for it.
        walk, block, _, part = take_item(schedule_ptr, walk, worker, W)
        finish_latent(
            acc, totals, peak * base2_scale(rules), block, part, pack, sums, q[HALF].index(0),
            out_desc, out_rows, lse_rows, parts, schedule_ptr, walk, worker, C, HALF,
        )  # fmt: skip
        _, block, tiles, _ = take_item(schedule_ptr, walk, worker, W)
    write_empty_blocks(schedule_ptr, worker, pack, out_rows, lse_rows, O_LAYOUT, C, HALF)
