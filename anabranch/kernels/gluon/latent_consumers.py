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

from anabranch.kernels.gluon.barriers import (
    BOTH_CONSUMERS,
    CONSUMER_AND_PRODUCER,
    EVEN_DONE,
    LEFT_FREE,
    ODD_DONE,
    RIGHT_FREE,
    bar_arrive,
    bar_sync,
    exp2,
    hidden_zero,
)
from anabranch.kernels.gluon.latent_finish import finish_latent, write_empty_blocks
from anabranch.kernels.gluon.operands import EndedRows, FullTiles, Sight
from anabranch.kernels.gluon.tile import base2_scale, logits_of, thread_sums
from anabranch.kernels.gluon.versions import thread_barrier
from anabranch.kernels.schedule.walk import begin_share, take_item
from anabranch.kernels.softmax.online_softmax import pivot_of, seen_by_all

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, S_LAYOUT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))


@gluon.jit
def score_half(room, q_rest, zero, phase, HALF: gl.constexpr):
    """Q K^T of one half of a tile, as soon as its columns arrive."""
    q_left, q_right = room.q
    k_left, k_right, k_rest = room.k
    s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
    mbarrier.wait(room.k_full[0].index(HALF), phase)
    keys = k_left.index(zero + HALF).permute((1, 0))
    s = warpgroup_mma(q_left.index(zero), keys, s, use_acc=False, is_async=True)
    mbarrier.wait(room.k_full[1].index(HALF), phase)
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
def attend_even(room, q_rest, state, done, half, full, sight, rules, C: gl.constexpr):
    """The left consumer's turn: score the even half, weigh the left columns of both."""
    acc, totals, peak = state
    k = room.k[0]
    scale = base2_scale(rules, C)
    zero = hidden_zero(done)
    s = score_half(room, q_rest, zero, done & 1, 0)
    s = logits_of(s, half, full, sight, rules, C)
    even = gl.maximum(peak, gl.max(s, 1))
    pivot = pivot_of(even * scale)
    s = exp2(s * scale - pivot[:, None])
    p = s.to(room.p_even.dtype)
    room.p_even.store(p)
    room.peak_even.store(even)
    bar_arrive(EVEN_DONE, BOTH_CONSUMERS)
    keep = exp2(peak * scale - pivot)
    totals = scaled(totals, keep) + thread_sums(s, C)
    acc = scaled(acc, keep)
    p = gl.convert_layout(p, WEIGHTS)
    acc = warpgroup_mma(p, k.index(zero), acc, is_async=True)
    bar_sync(ODD_DONE, BOTH_CONSUMERS)
    peak = room.peak_odd.load(ROW)
    keep = exp2(even * scale - pivot_of(peak * scale))
    totals = scaled(totals, keep)
    acc, p = warpgroup_mma_wait(0, [acc, p])
    bar_arrive(LEFT_FREE, CONSUMER_AND_PRODUCER)
    acc = scaled(acc, keep)
    acc = warpgroup_mma(room.p_odd, k.index(zero + 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    bar_arrive(LEFT_FREE + 1, CONSUMER_AND_PRODUCER)
    return acc, totals, peak


@gluon.jit
def attend_odd(room, q_rest, state, done, half, full, sight, rules, C: gl.constexpr):
    """The right consumer's turn: score the odd half, weigh the right columns of both."""
    acc, totals, peak = state
    k = room.k[1]
    scale = base2_scale(rules, C)
    zero = hidden_zero(done)
    s = score_half(room, q_rest, zero, done & 1, 1)
    s = logits_of(s, half, full, sight, rules, C)
    own = gl.max(s, 1)
    bar_sync(EVEN_DONE, BOTH_CONSUMERS)
    even = room.peak_even.load(ROW)
    p = room.p_even.load(WEIGHTS)
    odd = gl.maximum(even, own)
    pivot = pivot_of(odd * scale)
    s = exp2(s * scale - pivot[:, None])
    p_own = s.to(room.p_odd.dtype)
    room.p_odd.store(p_own)
    room.peak_odd.store(odd)
    fence_async_shared()
    bar_arrive(ODD_DONE, BOTH_CONSUMERS)
    keep = exp2(peak * scale - pivot)
    totals = scaled(totals, keep) + thread_sums(s, C)
    acc = scaled(acc, keep)
    p = scaled(p.to(gl.float32), exp2(even * scale - pivot)).to(room.p_odd.dtype)
    acc = warpgroup_mma(p, k.index(zero), acc, is_async=True)
    p_own = gl.convert_layout(p_own, WEIGHTS)
    acc = warpgroup_mma(p_own, k.index(zero + 1), acc, is_async=True)
    acc, p, p_own = warpgroup_mma_wait(1, [acc, p, p_own])
    bar_arrive(RIGHT_FREE, CONSUMER_AND_PRODUCER)
    acc, p_own = warpgroup_mma_wait(0, [acc, p_own])
    bar_arrive(RIGHT_FREE + 1, CONSUMER_AND_PRODUCER)
    return acc, totals, odd


@gluon.jit
def consume_latent(room, out_desc, given, C: gl.constexpr, HALF: gl.constexpr):
    """Attend to one item after another, to the end of the share."""
    W: gl.constexpr = C.work
    GROUP: gl.constexpr = W.group
    rules = given.rules
    worker, pack = gl.program_id(0) // C.num_packs, gl.program_id(0) % C.num_packs
    done = 0  # tiles
    taken = 0  # items
    if C.overlap:
        gdc_wait()
    spot = begin_share(worker, given.order, W)
    _, item = take_item(spot, worker, given.order, W)
    while item.tile < item.stop:
        block, stop = item.block, item.stop
        rows = block.first_row + gl.arange(0, 64, ROW)
        tokens = rows // GROUP
        tree_rows = None
        if rules.tree_mask is not None:
            last_token = gl.minimum(tokens, block.q_len - 1)
            places = (block.q_start + last_token).to(gl.int64)
            tree_rows = rules.tree_mask + places * given.tree_width
        last_row = gl.minimum(block.first_row + 64, block.q_len * GROUP) - 1
        start, end = seen_by_all(
            block.first_row // GROUP, last_row // GROUP, block, rules, C.causal
        )
        full = FullTiles((start + 63) // 64, end // 64)  # halves of tiles
        sight = Sight(tokens, tree_rows, given.tree_width, block)
        mbarrier.wait(room.q_full, taken & 1)
        q_rest = room.p_odd.load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        peak = gl.full([64], -float("inf"), gl.float32, ROW)
        totals = thread_sums(gl.zeros([64, 64], gl.float32, S_LAYOUT), C)
        acc = gl.zeros([64, 256], gl.float32, O_LAYOUT)
        valid = block.seq_len - (stop - 1) * 128
        clear_latent_tail(room.k[HALF], room.k_full[HALF], done & 1, valid)
        state = (acc, totals, peak)
        for count in range(0, stop - item.tile):
            half = 2 * (stop - 1 - count) + HALF
            if HALF == 0:
                state = attend_even(room, q_rest, state, done, half, full, sight, rules, C)
            else:
                state = attend_odd(room, q_rest, state, done, half, full, sight, rules, C)
            done += 1
        acc, totals, peak = state
        taken += 1
        # The item is read again, so that the loop needs no registers for it.
        spot, item = take_item(spot, worker, given.order, W)
        ended = EndedRows(item.block, pack, item.part, item.num_parts, item.first_slot, HALF)
        peak = peak * base2_scale(rules, C)
        finish_latent(acc, totals, peak, ended, room, out_desc, given, spot, worker, C, HALF)
        _, item = take_item(spot, worker, given.order, W)
    write_empty_blocks(worker, pack, given, O_LAYOUT, C, HALF)
