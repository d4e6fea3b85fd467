"""Items of work as kernels read them: what `order.py` has written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

HEADER: tl.constexpr = tl.constexpr(8)  # items, packs of a section, first token of no sequence
ITEM: tl.constexpr = tl.constexpr(12)  # an OrderedItem and its part, padded


class OrderedItem(NamedTuple):
    """Some rows of one sequence, and the tiles of keys to attend to."""

    origin: Any  # its own row of the page table, or where its contiguous keys begin
    first_row: Any
    q_start: Any
    q_len: Any
    seq_len: Any
    first_tile: Any
    num_tiles: Any


@triton.jit
def ticket_of(order_ptr, turn, C: tl.constexpr):
    """The work of a turn, item * num_packs + pack, or -1 after the last turn.

    Sections of packs one after another, and in each the longest items first.
    """
    num_items = tl.load(order_ptr)
    section = tl.load(order_ptr + 1)
    turns = tl.maximum(section * num_items, 1)
    inner = turn % turns
    ticket = inner // section * C.num_packs + turn // turns * section + inner % section
    return tl.where(turn < num_items * C.num_packs, ticket, -1)


@triton.jit
def read_item(order_ptr, item):
    ptr = order_ptr + HEADER + item * ITEM
    return OrderedItem(
        tl.load(ptr),
        tl.load(ptr + 1),
        tl.load(ptr + 2),
        tl.load(ptr + 3),
        tl.load(ptr + 4),
        tl.load(ptr + 5),
        tl.load(ptr + 6),
    )


@triton.jit
def read_part(order_ptr, item):
    """(part, num_parts, first_slot) of an item."""
    ptr = order_ptr + HEADER + item * ITEM + 7
    return tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2)
