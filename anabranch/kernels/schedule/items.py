"""Items of work as kernels read them: what `order.py` has written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels import hopper_config

HEADER: tl.constexpr = tl.constexpr(8)  # items, packs of a section, first token of no sequence,
# blocks that are cut
CACHE_BYTES: tl.constexpr = tl.constexpr(hopper_config.CACHE_BYTES)
ITEMS_A_PROGRAM: tl.constexpr = tl.constexpr(3)  # of the longest, for sections
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


@triton.jit
def section_of(num_keys, total, longest, C: tl.constexpr):
    """Packs attended to side by side: as many as the L2 cache holds keys and values of.

    All of them where programs have a few of the longest items each: those of the last section would
    begin late. 1012 tokens at 23580 keys beside 50 decodes took 907 us in sections, FA3 640.
    192/128 on an H200, us: 16 heads, 1 x 2048 (all fit): 54 at once, 66 in sections. 1 x 8192: 561
    at once, 572 in two; 128 heads, 1 x 4096: 1145, and 1177 in sections twice as large.
    """
    is_long = total * C.num_packs >= ITEMS_A_PROGRAM * longest * C.num_programs
    section = tl.full([], C.num_packs, tl.int32)
    bytes_a_kv_head = num_keys * C.bytes_a_key
    for _ in tl.static_range(8):
        kv_heads = tl.cdiv(section, C.packs_per_kv)
        halves = (section % 2 == 0) & (kv_heads * bytes_a_kv_head > CACHE_BYTES) & is_long
        section = tl.where(halves, section // 2, section)
    return section
