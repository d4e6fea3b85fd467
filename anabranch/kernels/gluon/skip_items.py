"""Items of at most 64 rows: the second consumer has none of them and multiplies nothing."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from anabranch.kernels.gluon.barriers import K_FREE, PAIR_AND_PRODUCER, V_FREE, bar_arrive, uniform
from anabranch.kernels.gluon.clear_tail import clear_tail
from anabranch.kernels.gluon.queue import next_ticket
from anabranch.kernels.schedule.items import read_item


@gluon.jit
def pass_items(
    v, bars, queue, order_ptr, ticket, taken, done, C: gl.constexpr, WG: gl.constexpr
):  # fmt: skip
    """Go on to the next item that has rows for this consumer: the ticket, items and tiles begun.

    Tiles of the others are freed as `consume` does it. Each is waited for: a second arrival before
    the producer's would be one too many.
    """
    q_full, q_empty, k_full, v_full = bars
    while has_no_rows(order_ptr, ticket, C, WG):
        _, _, _, _, seq_len, first_tile, num_tiles = read_item(order_ptr, ticket // C.num_packs)
        last_tile = first_tile + num_tiles - 1
        mbarrier.wait(q_full.index(WG), taken & 1)
        mbarrier.arrive(q_empty.index(WG))
        clear_tail(v, v_full, done, seq_len - last_tile * C.block_n, C, WG)
        for _ in range(0, num_tiles):
            slot = done % C.stages
            phase = (done // C.stages) & 1
            mbarrier.wait(k_full.index(slot), phase)
            bar_arrive(K_FREE + slot, PAIR_AND_PRODUCER)
            mbarrier.wait(v_full.index(slot), phase)
            bar_arrive(V_FREE + slot, PAIR_AND_PRODUCER)
            done += 1
        ticket = next_ticket(queue, taken, 4)
        taken += 1
    return ticket, taken, done


@gluon.jit
def has_no_rows(order_ptr, ticket, C: gl.constexpr, WG: gl.constexpr):
    """Whether all rows of an item are the first consumer's."""
    item = gl.maximum(ticket, 0) // C.num_packs
    _, first_row, _, q_len, _, _, _ = read_item(order_ptr, item)
    idle = (ticket >= 0) & (first_row + WG * 64 >= q_len * C.pack)
    return uniform(idle.to(gl.int32)) != 0
