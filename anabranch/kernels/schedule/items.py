"""Items of work as kernels read them: what `order.py` has written."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anabranch.kernels import hopper_config

HEADER: tl.constexpr = tl.constexpr(8)  # items, packs of a section, first token of no sequence
CACHE_BYTES: tl.constexpr = tl.constexpr(hopper_config.CACHE_BYTES)
SHARING: tl.constexpr = tl.constexpr(4)  # programs that attend to a kv head at a time
ITEM: tl.constexpr = tl.constexpr(12)  # an OrderedItem and its part, padded
CUT: tl.constexpr = tl.constexpr(8)  # a CutBlock, padded


class OrderedItem(NamedTuple):
    """Some rows of one sequence, and the tiles of keys to attend to."""

    origin: Any  # its own row of the page table, or where its contiguous keys begin
    first_row: Any
    q_start: Any
    q_len: Any
    seq_len: Any
    first_tile: Any
    num_tiles: Any


class CutBlock(NamedTuple):
    """A block that is cut, for the merge of its parts; after the last comes one of no parts."""

    first_row: Any
    q_start: Any
    q_len: Any
    num_parts: Any
    first_slot: Any


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
def read_cut(cut_ptr, place):
    ptr = cut_ptr + place * CUT
    return CutBlock(
        tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4)
    )


@triton.jit
def is_cut(cut):
    """Whether a record is one of a block. All of it is asked, so that it is loaded at once."""
    return (cut.num_parts > 0) & ((cut.first_row | cut.q_start | cut.q_len | cut.first_slot) >= 0)


@triton.jit
def section_of(num_keys, packs, C: tl.constexpr):
    """Packs attended to side by side: as many as the L2 cache holds keys and values of.

    All of them where several programs attend to each kv head at a time: they read the same keys at
    about the same time. Sections then only cost, since the items of the last one begin late: 1001
    tokens at 27938 keys beside 117 decodes, 64/8 heads, took 1750 us in sections and 1417 without,
    16384 tokens, 32/8 heads, 3437 and 3390, 8192 tokens, 16 heads of 192/128, 501 and 497. But 128
    heads of 192/128, 1 x 4096: 1145, and 1177 in sections twice as large.
    """
    section = packs.num_packs
    if SHARING * (packs.num_packs // packs.packs_per_kv) > C.num_programs:
        bytes_a_kv_head = num_keys * packs.bytes_a_key
        for _ in tl.static_range(8):
            kv_heads = tl.cdiv(section, packs.packs_per_kv)
            halves = (section % 2 == 0) & (kv_heads * bytes_a_kv_head > CACHE_BYTES)
            section = tl.where(halves, section // 2, section)
    return section
