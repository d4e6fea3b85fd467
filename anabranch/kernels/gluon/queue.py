"""The queue of tickets: the first producer takes them, one ahead of the other partitions.

A ticket names an item and a pack of heads (`items.ticket_of`), or is -1 when nothing is left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from anabranch.kernels.gluon.barriers import make_barriers, uniform
from anabranch.kernels.schedule.items import ticket_of


@gluon.jit
def make_queue():
    """(tickets, ready, taken): two places, filled by one partition and read by three."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tickets = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    return tickets, make_barriers(2, 1), make_barriers(2, 3)


@gluon.jit
def first_ticket(order_ptr, C: gl.constexpr):
    """Programs begin with the turn of their own number; the counter hands out the others.

    Every partition asks for it before it reads anything else, so it waits for the kernel ahead.
    """
    if C.overlap:
        gdc_wait()
    return uniform(ticket_of(order_ptr, gl.program_id(0), C))


@gluon.jit
def take_turn(counter_ptr):
    """The next turn that no program has; asked for early, since the answer takes a microsecond.

    Only the number matters. In the default order, acquire and release, it would wait for all
    earlier writes and empty the L1 cache.
    """
    return gl.atomic_add(counter_ptr, 1, sem="relaxed") + gl.num_programs(0)


@gluon.jit
def reset_counter(order_ptr, counter_ptr, turn, C: gl.constexpr):
    """The program with the last of all turns leaves the counter at 0.

    There are as many turns to take as items times packs, so none is taken after it. An atomic,
    since relaxed turns order no plain store after those that other programs took.
    """
    num_turns = gl.load(order_ptr) * C.num_packs
    if turn == num_turns + gl.num_programs(0) - 1:
        gl.atomic_xchg(counter_ptr, 0, sem="relaxed")


@gluon.jit
def publish_ticket(queue, order_ptr, turn, count, C: gl.constexpr):
    """Hand the ticket of a turn to the other partitions."""
    tickets, ready, taken = queue
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ticket = ticket_of(order_ptr, turn, C)
    mbarrier.wait(taken.index(count % 2), ((count // 2) & 1) ^ 1)
    tickets.index(count % 2).store(gl.full([1], 0, gl.int32, one) + ticket)
    mbarrier.arrive(ready.index(count % 2))
    return ticket


@gluon.jit
def next_ticket(queue, count, WARPS: gl.constexpr):
    """The ticket that the first producer took."""
    tickets, ready, taken = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(ready.index(count % 2), (count // 2) & 1)
    ticket = uniform(gl.max(tickets.index(count % 2).load(layout), 0))
    mbarrier.arrive(taken.index(count % 2))
    return ticket
