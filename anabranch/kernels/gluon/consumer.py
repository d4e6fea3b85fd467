"""The consumer: one warpgroup that attends from 64 rows of a block to the tiles of an item.

Tiles come from the last key to the first, so the masked ones lie at the ends of the loop. While the
matrix unit multiplies the weights of one tile with its values, the scores of the next one are under
way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from anabranch.kernels.gluon.barriers import (
    BOTH_AND_PRODUCER,
    V_FREE,
    bar_arrive,
    carry_weights,
)
from anabranch.kernels.gluon.clear_tail import clear_tail
from anabranch.kernels.gluon.finish import finish_item
from anabranch.kernels.gluon.operands import FullTiles, Running, Sight
from anabranch.kernels.gluon.queue import first_ticket, next_ticket
from anabranch.kernels.gluon.skip_items import skip_items
from anabranch.kernels.gluon.tile import (
    attend_tile,
    first_weights,
    issue_values,
    thread_sums,
)
from anabranch.kernels.schedule.items import read_item
from anabranch.kernels.softmax.online_softmax import seen_by_all


@gluon.jit
def consume(q, k, v, staging, queue, given, C: gl.constexpr, WG: gl.constexpr):
    """Attend to one item after another, until the queue is empty."""
    BLOCK_N: gl.constexpr = C.block_n
    MAIN: gl.constexpr = C.dv_main
    REST: gl.constexpr = C.dv_rest or 16
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    main_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    rules = given.rules
    done = 0  # tiles of V finished
    taken = 0  # items begun
    ticket = first_ticket(given.order, C)
    if WG == 1 and C.splits:
        ticket, taken, done = skip_items(q, k, v, queue, given.order, ticket, taken, done, C, WG)
    while ticket >= 0:
        block = read_item(given.order, ticket // C.num_packs)
        num_tiles = block.num_tiles
        rows = block.first_row + WG * 64 + gl.arange(0, 64, row_layout)
        tokens = rows // C.pack
        tree_rows = None
        if rules.tree_mask is not None:
            last_token = gl.minimum(tokens, block.q_len - 1)
            tree_rows = (
                rules.tree_mask + (block.q_start + last_token).to(gl.int64) * given.tree_width
            )
        last_tile = block.first_tile + num_tiles - 1
        last_row = gl.minimum(block.first_row + 128, block.q_len * C.pack) - 1
        start, stop = seen_by_all(
            block.first_row // C.pack, last_row // C.pack, block, rules, C.causal
        )
        full = FullTiles((start + C.block_n - 1) // C.block_n, stop // C.block_n)
        sight = Sight(tokens, tree_rows, given.tree_width, block)

        mbarrier.wait(q.full.index(WG), taken & 1)
        q_main = 0
        if C.q_columns:
            queries = q.main.index(WG)
            if C.q_columns < C.dk_main:
                queries = queries.slice(0, C.q_columns, 1)
            q_main = queries.load(gl.DotOperandLayout(0, score_layout, 2))
        weights, peak = first_weights(q, q_main, k, done, last_tile, sight, rules, C, WG)
        # Not before the scores: loads from shared memory that a barrier follows may still be on
        # their way, and the next copy would overtake them.
        if C.frees_queries_early:
            mbarrier.arrive(q.empty.index(WG))
        total = thread_sums(weights, C)
        acc_main = gl.zeros([64, MAIN], gl.float32, main_layout)
        carried = carry_weights(weights, acc_main, v.main.dtype, C)
        acc_rest = gl.zeros([64, REST], gl.float32, rest_layout) if C.dv_rest else 0
        clear_tail(v, done, block.seq_len - last_tile * C.block_n, C, WG)
        mbarrier.wait(
            k.full.index((done + 1) % C.stages), ((done + 1) // C.stages) & 1, pred=num_tiles > 1
        )
        state = Running((acc_main, acc_rest), carried, total, peak)
        for count in range(1, num_tiles):
            tile = last_tile - count
            state = attend_tile(
                q, q_main, k, v, state, done, count, tile, full, sight, rules, C, WG
            )
            done += 1
        if not C.frees_queries_early:
            mbarrier.arrive(q.empty.index(WG))

        value_slot = done % C.stages
        mbarrier.wait(v.full.index(value_slot), (done // C.stages) & 1)
        acc, p = issue_values(state.carried, v, value_slot, state.acc, C)
        this = ticket
        ticket = next_ticket(queue, taken, 4)
        if C.dv_rest:
            main, rest, p = warpgroup_mma_wait(0, [acc[0], acc[1], p])
            acc = (main, rest)
        else:
            main, p = warpgroup_mma_wait(0, [acc[0], p])
            acc = (main, acc[1])
        bar_arrive(V_FREE + value_slot, BOTH_AND_PRODUCER)
        done += 1
        taken += 1
        total = gl.convert_layout(gl.sum(state.total, 1), row_layout)
        finish_item(acc, total, state.peak, this, staging, given, C, WG)
        if WG == 1 and C.splits:
            ticket, taken, done = skip_items(
                q, k, v, queue, given.order, ticket, taken, done, C, WG
            )
    tma.store_wait(0)
