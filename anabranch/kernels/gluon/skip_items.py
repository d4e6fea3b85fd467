"""Items of at most 64 rows: the second consumer has none of them and multiplies nothing."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anabranch.kernels.gluon.barriers import BOTH_AND_PRODUCER, K_FREE, V_FREE, bar_arrive, uniform
from anabranch.kernels.gluon.clear_tail import clear_tail
from anabranch.kernels.gluon.queue import next_ticket
from anabranch.kernels.schedule.items import read_item


@gluon.jit
def skip_items(q, k, v, queue, order_ptr, ticket, taken, done, C: gl.constexpr, WG: gl.constexpr):
    """Go on to the next item that has rows for this consumer: the ticket, items and tiles begun.

    Tiles of the others are freed as `consume` does it. Each is waited for: a second arrival before
    the producer's would be one too many.
    """
    while has_no_rows(order_ptr, ticket, C, WG):
        block = read_item(order_ptr, ticket // C.num_packs)
        last_tile = block.first_tile + block.num_tiles - 1
        mbarrier.wait(q.full.index(WG), taken & 1)
        mbarrier.arrive(q.empty.index(WG))
        clear_tail(v, done, block.seq_len - last_tile * C.block_n, C, WG)
        for _ in range(0, block.num_tiles):
            slot = done % C.stages
            phase = (done // C.stages) & 1
            mbarrier.wait(k.full.index(slot), phase)
            bar_arrive(K_FREE + slot, BOTH_AND_PRODUCER)
            mbarrier.wait(v.full.index(slot), phase)
            bar_arrive(V_FREE + slot, BOTH_AND_PRODUCER)
            done += 1
        ticket = next_ticket(queue, taken, 4)
        taken += 1
    return ticket, taken, done


@gluon.jit
def has_no_rows(order_ptr, ticket, C: gl.constexpr, WG: gl.constexpr):
    """Whether all rows of an item are the first consumer's."""
    block = read_item(order_ptr, gl.maximum(ticket, 0) // C.num_packs)
    idle = (ticket >= 0) & (block.first_row + WG * 64 >= block.q_len * C.pack)
    return uniform(idle.to(gl.int32)) != 0
